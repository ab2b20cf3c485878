"""Shows which tokens of recorded conversations earned their reward: a credit heat map by any model, without training.

python -m experiments.explain --config=configs/smollm2_style.py --trace=chats.jsonl
python -m experiments.explain --config=configs/smollm2_style.py --trace=chats.jsonl --config.credit.name=grpo
python -m experiments.explain --config=configs/tool_calls.py --trace=sessions.jsonl --weights=runs/tool_calls-1a2b3c4d

A line of the file is {"messages": [{"role", "content", "reward"?}, ...], "group"?}: assistant messages are the actions,
a message's reward lands where it ends, lines of one group (or with equal prompts) share a baseline. The locating rules
and hints of the config are applied, and each located message is read again with its hint by the same model.

stdout ends with one JSON line: traces, tokens, hints, report (the HTML file, which loads nothing from anywhere).
"""

import pathlib

import numpy as np

from experiments import cli

_CONFIG = cli.config_file()
FLAGS = cli.Flags()
_TRACE = FLAGS.string("trace", None, "JSONL of conversations", required=True)
_WEIGHTS = FLAGS.string("weights", None, "run folder whose last parameters score (default: config.model as is)")
_OUT = FLAGS.string("out", None, "folder of report.html (default: runs/explain-<trace>)")

SHOWN = 20  # rows of the table


def row_of(one) -> tuple:
    """A line of the table from one report.TraceTokens."""
    acted = np.array([kind == "action" for kind in one.kinds])
    hinted = np.isfinite(one.teacher_prob)
    student, teacher = np.log(np.array(one.student_prob)), np.log(np.array(one.teacher_prob))
    gain = float(np.mean((teacher - student)[hinted])) if hinted.any() else None
    turns = sum(segment.kind == "action" for segment in one.segments)
    mean = float(np.mean(student[acted]))
    return one.title, one.meta["group"], turns, len(one.tokens), one.reward, sum(one.adv), mean, len(one.inserts), gain


COLUMNS = ("trace", "group", "turns", "tokens", "reward", "credit", "log p", "hints", "hinted - plain, nats")


def main(_) -> None:
    from configs import default
    from rsi_jax import metrics, report
    from rsi_jax.train import loop, recorded, samples, setup

    config, path = _CONFIG.value, _TRACE.value
    setup.check(config)
    conversations = recorded.read(path)
    env = setup.make_env(config) if config.model.source == "tiny" else None  # its words are the vocabulary
    needs = setup.bind_credit(config.credit)[1]
    model, params, chat = setup.make_model(config, env, value_head="value_BT" in needs)
    scorer = _WEIGHTS.value or config.model.source
    if _WEIGHTS.value:
        params = loop.last_params(pathlib.Path(_WEIGHTS.value), params)
    rollout, transcripts = recorded.render(conversations, chat, capacity=config.rollout.capacity, path=path)
    batch, entropy_BT = recorded.score(config, params, model, chat, rollout, transcripts)
    rules = list(config.feedback.rules)
    traces = samples.of_batch(batch, range(len(transcripts)), chat, rules, title="line", entropy_BT=entropy_BT)
    file = report.write_report(
        pathlib.Path(_OUT.value or f"runs/explain-{pathlib.Path(path).stem}"),
        title=f"{pathlib.Path(path).name}: {config.credit.name}",
        intro=f"Recorded conversations, scored by {scorer}; credit '{config.credit.name}'; no training."
        + (" The critic is untrained: its values say nothing." if "value_BT" in needs else ""),
        curves=(),
        transcripts=traces,
        config=config,
        defaults=default.get_config(),
        environment=report.environment(),
    )
    metrics.table(f"{path}, scored by {scorer}", COLUMNS, [row_of(one) for one in traces[:SHOWN]])
    if len(traces) > SHOWN:
        print(f"and {len(traces) - SHOWN} more in the report")
    print(f"report  {file}")
    metrics.finish(
        {
            "traces": len(traces),
            "tokens": sum(len(one.tokens) for one in traces),
            "hints": sum(len(one.inserts) for one in traces),
            "report": str(file),
        }
    )


if __name__ == "__main__":
    cli.run(main, FLAGS)
