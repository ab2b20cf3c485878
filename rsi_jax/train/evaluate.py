"""Measurements during and around training: task summaries, hint gain, perplexity."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rsi_jax import annotate, base, chains
from rsi_jax import rollout as rollout_lib
from rsi_jax.feedback import hints, locate

# transcripts -> scalars of an environment.
Summary = Callable[[list[base.Transcript]], dict[str, float]]

SHARES = ("success", "invalid", "filler_correct", "ended")  # scalars that are shares: Wilson's interval
BLOCKS = 20


@dataclasses.dataclass(frozen=True)
class Result:
    """One evaluation: scalars, and the rollouts behind them."""

    scalars: dict[str, float]
    rollout: base.Rollout
    transcripts: list[base.Transcript]


def evaluate(
    params,
    sampler: rollout_lib.Sampler,
    summary: Summary,
    *,
    seed: int,
    episodes: int,
    tick: Callable[[int], None] = lambda tokens: None,
) -> Result:
    """Plays `episodes` tasks of their own seeds, without hints, sampled as in training.

    Returns: `summarise` of them.
    """
    tasks = [rollout_lib.Task(seed + i, i) for i in range(episodes)]
    rollout, transcripts = rollout_lib.collect(params, tasks, jax.random.key(seed), sampler, tick=tick)
    return Result(summarise(transcripts, summary), rollout, transcripts)


def summarise(transcripts: list[base.Transcript], summary: Summary) -> dict[str, float]:
    """The environment's summary, the mean return and the mean response length (tokens per turn), of whole episodes."""
    transcripts = chains.episodes(transcripts)
    turns = [turn for transcript in transcripts for turn in transcript.turns]
    return {
        "return": float(np.mean([transcript.score for transcript in transcripts])),
        "response_tokens": float(np.mean([turn.length for turn in turns])),
        "turns": len(turns) / len(transcripts),
        "truncated": float(sum(transcript.truncated for transcript in transcripts)),
        "ended": float(np.mean([turn.finish != base.LENGTH for turn in turns])),
    } | summary(transcripts)


def read_text(name: str) -> str:
    """Reads the text whose perplexity is watched: a path, or a file of rsi_jax/data; '' = none.

    Raises: base.InputError when there is no such file.
    """
    shipped = pathlib.Path(base.__file__).parent / "data" / name
    file = pathlib.Path(name) if pathlib.Path(name).is_file() else shipped
    if name and not file.is_file():
        raise base.InputError(f"evaluation.perplexity_text={name!r}: no such file, here or in rsi_jax/data")
    return file.read_text(encoding="utf-8") if name else ""


def intervals(transcripts: list[base.Transcript], summary: Summary) -> dict[str, tuple[float, float]]:
    """95% intervals of the scalars of `summarise`, from what they do when a twentieth of the episodes is left out.

      se^2 = (g - 1) / g * sum over the g blocks of (theta without block j - mean of those)^2

    Turns of one episode are not independent; leaving out whole episodes counts them once. Shares: Wilson's interval on
    the number of independent trials with that error; others: normal. None for fewer than 2 episodes.
    """
    transcripts = chains.episodes(transcripts)
    whole, blocks = summarise(transcripts, summary), min(BLOCKS, len(transcripts))
    if blocks < 2:
        return {}
    parts = [
        summarise([t for i, t in enumerate(transcripts) if i % blocks != block], summary) for block in range(blocks)
    ]
    found = {}
    for name, value in whole.items():
        left_out = np.array([part[name] for part in parts], np.float64)
        error = math.sqrt((blocks - 1) / blocks * np.sum((left_out - left_out.mean()) ** 2))
        if name in SHARES:
            found[name] = interval(value, value * (1 - value) / error**2 if error else len(transcripts))
        else:
            half = 1.959964 * error
            found[name] = (value - half, value + half)
    return found


def interval(mean: float, count: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share over `count` trials."""
    if not count:
        return math.nan, math.nan
    z2 = 1.959964**2
    centre = (mean + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (mean * (1 - mean) / count + z2 / (4 * count * count))) / (1 + z2 / count)
    return centre - half, centre + half


def right_action_probability(
    params,
    config,
    chat,
    transcripts: Sequence[base.Transcript],
    findings: Sequence[locate.Finding],
    texts: Sequence[str],
    *,
    chunk: int,
) -> float:
    """Mean probability of the right action at located turns, with the given hint before each (stop token included).

    The environment must say what is right (`info["right"]`). NaN without findings.
    """
    if not findings:
        return math.nan
    prefixes, actions = [], []
    for finding, text in zip(findings, texts, strict=True):
        transcript, turn = transcripts[finding.row], transcripts[finding.row].turns[finding.turn]
        before, header = transcript.tokens[: turn.insert_at], transcript.tokens[turn.insert_at : turn.start]
        prefixes.append(before + (chat.hint(text) if text else []) + header)
        actions.append(chat.action(turn.info["right"]))
    return float(np.mean(np.exp(annotate.continuation_logp(params, config, prefixes, actions, chunk=chunk))))


def hint_gain(
    params,
    sampler: rollout_lib.Sampler,
    transcripts: Sequence[base.Transcript],
    rules,
    templates: hints.Templates,
    *,
    hint: str,
    limit: int,
    seed: str,
    chunk: int,
) -> dict[str, float]:
    """Measures what the hint is worth at located turns: right_hinted, right_irrelevant, right_bare, and
    gain = right_hinted - right_irrelevant (an irrelevant hint of the same length), over at most `limit` turns.

    Where the environment names no right action, probabilities are of not falling under the rule again: see `regain`.
    """
    findings, _ = locate.locate(transcripts, rules, per_rollout=4, seed=seed)
    findings = findings[:limit]
    measure = right_action_probability if _knows_right(transcripts) else None
    values = {}
    for name, writer in (("right_hinted", hint), ("right_irrelevant", "irrelevant"), ("right_bare", "empty")):
        texts = hints.write(writer, findings, transcripts, templates, seed=seed) if findings else []
        if measure:
            values[name] = measure(params, sampler.config, sampler.chat, transcripts, findings, texts, chunk=chunk)
        else:
            values[name] = regain(params, sampler, transcripts, findings, texts, rules, key=jax.random.key(0))
    return values | {"gain": values["right_hinted"] - values["right_irrelevant"], "gain_turns": float(len(findings))}


def _knows_right(transcripts: Sequence[base.Transcript]) -> bool:
    return "right" in transcripts[0].turns[0].info


def regain(
    params,
    sampler: rollout_lib.Sampler,
    transcripts: Sequence[base.Transcript],
    findings: Sequence[locate.Finding],
    texts: Sequence[str],
    rules,
    *,
    key: jax.Array,
) -> float:
    """Samples each located turn once more with the hint before it: the share that the rule no longer finds.

    For rules that read the action alone (style); a rule over the environment's answer sees no answer here. NaN without
    findings.
    """
    if not findings:
        return math.nan
    prompts = []
    for finding, text in zip(findings, texts, strict=True):
        transcript, turn = transcripts[finding.row], transcripts[finding.row].turns[finding.turn]
        hint = sampler.chat.hint(text) if text else []
        prompts.append(transcript.tokens[: turn.insert_at] + hint + transcript.tokens[turn.insert_at : turn.start])
    turns = rollout_lib.complete(params, prompts, key, sampler)
    clear = 0
    for finding, (ids, finish) in zip(findings, turns, strict=True):
        record = base.TurnRecord([], sampler.chat.text(ids), 0, len(ids), 0, finish)
        clear += not rules[finding.rule](base.Transcript(0, 0, turns=[record]), 0)
    return clear / len(findings)
