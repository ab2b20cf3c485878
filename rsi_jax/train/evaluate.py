"""Measurements during and around training: task summaries, hint gain, perplexity."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import chex
import jax
import numpy as np

from rsi_jax import annotate, base
from rsi_jax import rollout as rollout_lib
from rsi_jax.feedback import hints, locate


@dataclasses.dataclass(frozen=True)
class Result:
    """One evaluation: scalars, and the rollouts behind them."""

    scalars: dict[str, float]
    rollout: base.Rollout
    transcripts: list[base.Transcript]


def evaluate(
    params,
    sampler: rollout_lib.Sampler,
    summary: Callable[[list[base.Transcript]], dict[str, float]],
    *,
    seed: int,
    episodes: int,
    tick: Callable[[int], None] = lambda tokens: None,
) -> Result:
    """Plays `episodes` tasks of their own seeds, without hints, sampled as in training.

    Returns: the environment's summary, the mean return and the mean response length (tokens per turn).
    """
    tasks = [rollout_lib.Task(seed + i, i) for i in range(episodes)]
    rollout, transcripts = rollout_lib.collect(params, tasks, jax.random.key(seed), sampler, tick=tick)
    turns = [turn for transcript in transcripts for turn in transcript.turns]
    scalars = summary(transcripts) | {
        "return": float(np.mean([transcript.score for transcript in transcripts])),
        "response_tokens": float(np.mean([turn.length for turn in turns])),
        "turns": len(turns) / len(transcripts),
        "truncated": float(sum(transcript.truncated for transcript in transcripts)),
        "ended": float(np.mean([turn.finish != base.LENGTH for turn in turns])),
    }
    return Result(scalars, rollout, transcripts)


def interval(mean: float, count: int) -> tuple[float, float]:
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
    key: chex.PRNGKey,
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
        prompts.append(
            transcript.tokens[: turn.insert_at] + hint + transcript.tokens[turn.insert_at : turn.start]
        )
    turns = rollout_lib.complete(params, prompts, key, sampler)
    clear = 0
    for finding, (ids, finish) in zip(findings, turns, strict=True):
        record = base.TurnRecord([], sampler.chat.text(ids), 0, len(ids), 0, finish)
        clear += not rules[finding.rule](base.Transcript(0, 0, turns=[record]), 0)
    return clear / len(findings)
