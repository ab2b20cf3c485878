"""Trains a model by a list of stages, measures it before and after, and writes a report.

python -m experiments.train --config=configs/tool_calls.py
python -m experiments.train --config=configs/tool_calls.py --config.credit.name=grpo --config.rl.updates=100

The same command continues the same run after a kill, and prints a finished run's result again. Progress goes to stderr.
stdout ends with one JSON line (null where a task has no such measure): success_before, success_after, return_before,
return_after (mean per episode), invalid_before, invalid_after, filler_correct_after, length_before, length_after
(tokens per response), perplexity_ratio (after / before), hint_gain (before RL), generated_tokens (in training), wall_s
(accounted wall time), run_dir, digest (SHA-256 of the final state).
"""

import pathlib

from absl import flags

from experiments import cli

_CONFIG = cli.config_file()
FLAGS = cli.Flags()
_RUN_DIR = FLAGS.string("run_dir", None, "run folder (default: runs/<config>-<digest of the effective config>)")
_FRESH = FLAGS.bool("fresh", False, "delete the run folder and start anew")
_PROFILE = FLAGS.bool("profile", False, "write a jax.profiler trace of a few steps into <run folder>/profile")


def main(_) -> None:
    from configs import default
    from rsi_jax import metrics, report, train
    from rsi_jax.train import present, setup

    config = _CONFIG.value
    if _RUN_DIR.value is not None:
        config.run_dir = _RUN_DIR.value
    setup.check(config)
    file = flags.FLAGS["config"].config_filename
    name = pathlib.Path(file.split(":", 1)[0]).stem
    folder = present.open_folder(config, name=name, fresh=_FRESH.value)
    with present.lock(folder):
        results = present.finished(folder)
        if results is None:
            present.keep_compiled(folder)
            results = train.run(config, folder, defaults=default.get_config(), profile=_PROFILE.value)
            results = present.store(folder, results)
    rows = present.headline(results, config.evaluation.final_episodes)
    present.table(rows, f"{name}: before and after, without hints")
    print(f"run folder    {folder}\nreport        {folder / report.REPORT_FILE}")
    print(f"compare arms  python -m experiments.ablate_arms --config={file}")
    metrics.finish(present.line(results, folder))


if __name__ == "__main__":
    cli.run(main, FLAGS)
