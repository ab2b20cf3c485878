"""What benchmarks share: how a program is measured (median of its runs, CPU beside wall, memory); a long rollout."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Timing(NamedTuple):
    """A compiled program, run: its result on the device, and medians over the runs after the first.

    first_s: seconds to compile and run once. cpu_s: seconds of all threads of this process. temp_bytes: memory that
    the program needs beside its arguments and results, from the compiler.
    """

    result: Any
    first_s: float
    wall_s: float
    cpu_s: float
    temp_bytes: int


def timed(function: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> Timing:
    """Compiles `function` for `args` and runs it 1 + `repeats` times."""
    import jax

    args = jax.device_put(args)
    begun = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    result = jax.block_until_ready(compiled(*args))
    first_s, walls, cpus = time.perf_counter() - begun, [], []
    for _ in range(repeats):
        del result  # a second result beside the first would double the memory of large programs
        begun, cpu = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(compiled(*args))
        walls.append(time.perf_counter() - begun)
        cpus.append(time.process_time() - cpu)
    memory = compiled.memory_analysis()
    return Timing(result, first_s, statistics.median(walls), statistics.median(cpus), memory.temp_size_in_bytes)


def by_turns(functions: Mapping[Any, Callable[..., Any]], args: tuple[Any, ...], repeats: int) -> dict[Any, Timing]:
    """Compiles programs of the same arguments and runs them by turns, 1 + `repeats` times; no results are kept."""
    import jax

    compiled, first, times = {}, {}, {name: [] for name in functions}
    for name, function in functions.items():
        begun = time.perf_counter()
        compiled[name] = jax.jit(function).lower(*args).compile()
        jax.block_until_ready(compiled[name](*args))
        first[name] = time.perf_counter() - begun
    for _ in range(repeats):
        for name, run in compiled.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*args))
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    found = {}
    for name, run in compiled.items():
        wall_s, cpu_s = (statistics.median(column) for column in zip(*times[name], strict=True))
        found[name] = Timing(None, first[name], wall_s, cpu_s, run.memory_analysis().temp_size_in_bytes)
    return found


def places(tokens: int, hints: int, span: int) -> np.ndarray:
    """Where the spans of a rollout begin: evenly spaced, the last one ending with it."""
    return np.linspace(0, tokens - span, hints + 1).astype(np.int32)[1:]


def rollout(tokens: int, hints: int, *, vocab: int, hint: int, span: int, seed: int = 0):
    """One rollout of random words as host columns: a turn of `span` tokens at each place, observations between.

    Each turn has a view: a hint of `hint` tokens right before it.
    """
    from rsi_jax import base

    rng, start_K = np.random.default_rng(seed), places(tokens, hints, span)
    edges = np.unique(np.concatenate([[0], start_K, start_K + span]))
    S = len(edges) - 1
    fill = dict(kind=base.OBSERVATION, finish=base.NOT_SAMPLED, anchor=base.NO_ANCHOR, parent=base.NO_PARENT)
    columns = {f"{name}_BS": np.full((1, S), value, np.int32) for name, value in fill.items()}
    columns |= {"start_BS": edges[None, :-1], "length_BS": np.diff(edges)[None]}
    acted = np.isin(edges[:-1], start_K)[None]
    columns["kind_BS"], columns["finish_BS"] = (
        np.where(acted, base.ACTION, base.OBSERVATION),
        np.where(acted, base.STOP, 0),
    )
    reward_BS, discount_BS = np.zeros((1, S), np.float32), np.ones((1, S), np.float32)
    reward_BS[0, -1], discount_BS[0, -1] = 1.0, 0.0
    ones_K, zero_K = np.ones(hints, np.float32), np.zeros(hints, np.int32)
    views = base.Views(
        rollout_K=zero_K, insert_at_K=start_K, span_start_K=start_K, span_length_K=zero_K + span,
        hint_KN=rng.integers(0, vocab, (hints, hint), np.int32), hint_length_K=zero_K + hint, source_K=zero_K,
        weight_K=ones_K, polarity_K=ones_K, branch=hints * (hint + span),
    )  # fmt: skip
    zero_BT, zero_B = np.zeros((1, tokens), np.float32), np.zeros(1, np.int32)
    segments = base.Segments(reward_BS=reward_BS, discount_BS=discount_BS, **columns)
    return base.Rollout(
        tokens_BT=rng.integers(0, vocab, (1, tokens), np.int32), logp_BT=zero_BT, kept_mass_BT=zero_BT + 1,
        group_B=zero_B, segments=segments, weight_B=np.ones(1, np.float32), chain_B=zero_B, views=views,
    )  # fmt: skip
