"""Times attention over one long row and measures its memory: chunked against the reference and jax.nn.

python -m experiments.bench_attention --tokens=4096

Rows: causal; window (causal, 256 tokens back); packed (8 sequences); branches (a trunk of half the tokens, and 8 hinted
re-readings of it). Programs: chunked; reference; jax.nn.dot_product_attention (causal rows), the latter two, whose
memory is O(tokens^2), up to 4,096 tokens. Each forwards only and with the gradients of q, k and v. A time is the median
of --repeats runs after the first; the programs of a row take turns.
stdout ends with one JSON line: rows, a list of {row, program, pass, visible (share of all pairs), wall_ms, cpu_ms,
temp_mib, wall_over_chunked, cpu_over_chunked}.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments import bench, cli

FLAGS = cli.Flags()
_TOKENS = FLAGS.integer("tokens", 4096, "tokens of the row", lower_bound=32)
_HEADS = FLAGS.integer("heads", 4, "query heads", lower_bound=1)
_KV_HEADS = FLAGS.integer("kv_heads", 2, "kv heads; divides --heads", lower_bound=1)
_HEAD_SIZE = FLAGS.integer("head_size", 64, "size of a head", lower_bound=1)
_REPEATS = FLAGS.integer("repeats", 5, "timed runs of each program", lower_bound=1)

WINDOW, SEQUENCES, BRANCHES = 256, 8, 8
MOST_SQUARED = 4096  # tokens up to which a program of O(tokens^2) memory is run


def ranges_of(tokens: int) -> dict[str, np.ndarray]:
    """Makes the key ranges of each row by name: int32 [4, tokens], lo1, hi1, lo2, hi2 of each query."""
    query = np.arange(tokens)
    zero = np.zeros(tokens, int)
    trunk = tokens // 2
    branch = np.maximum(query - trunk, 0) * BRANCHES // (tokens - trunk)
    insert_at = np.where(query < trunk, 0, (branch + 1) * trunk // (BRANCHES + 1))
    first = np.searchsorted(query * SEQUENCES // tokens, np.arange(SEQUENCES))
    fork = trunk + np.searchsorted(branch[trunk:], np.arange(BRANCHES))
    found = {
        "causal": (zero, zero, zero, query + 1),
        "window": (zero, zero, np.maximum(0, query + 1 - WINDOW), query + 1),
        "packed": (zero, zero, first[query * SEQUENCES // tokens], query + 1),
        "branches": (zero, insert_at, np.where(query < trunk, 0, fork[branch]), query + 1),
    }
    return {name: np.stack(ranges).astype(np.int32) for name, ranges in found.items()}


def visible_share(ranges_4T: np.ndarray) -> float:
    """Share of the tokens^2 pairs that are visible."""
    lo1, hi1, lo2, hi2 = ranges_4T.astype(np.int64)
    return float((np.maximum(hi1 - lo1, 0) + np.maximum(hi2 - lo2, 0)).sum() / ranges_4T.shape[1] ** 2)


def programs(row: str, tokens: int, scale: float) -> dict[str, Callable]:
    """The programs to run on a row by name, each out = program(q, k, v, ranges)."""
    import functools

    import jax

    from rsi_jax.kernels import attention

    found = {"chunked": functools.partial(attention.attention, implementation="chunked", scale=scale)}
    if tokens <= MOST_SQUARED:
        found["reference"] = functools.partial(attention.attention, implementation="reference", scale=scale)
        if row == "causal":
            found["jax.nn"] = lambda q, k, v, _: jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)
    return found


def results(row: str, visible: float, found: Mapping[tuple[str, str], bench.Timing]) -> list[dict[str, Any]]:
    """Makes the lines of a row: what was measured, and how many times as long as chunked it took."""
    lines = []
    for (program, name), one in found.items():
        chunked = found["chunked", name]
        line = {"row": row, "program": program, "pass": name, "visible": visible}
        line |= {"wall_ms": 1000 * one.wall_s, "cpu_ms": 1000 * one.cpu_s, "temp_mib": one.temp_bytes / 2**20}
        ratios = {"wall_over_chunked": one.wall_s / chunked.wall_s, "cpu_over_chunked": one.cpu_s / chunked.cpu_s}
        lines.append(line | ratios)
    return lines


def main(_) -> None:
    import jax
    import jax.numpy as jnp

    from rsi_jax import base, metrics
    from rsi_jax.kernels import attention

    tokens, heads, kv_heads, size = _TOKENS.value, _HEADS.value, _KV_HEADS.value, _HEAD_SIZE.value
    if heads % kv_heads:
        raise base.InputError(f"--heads={heads} must be a multiple of --kv_heads={kv_heads}")
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, tokens, n, size)), jnp.float32) for n in (heads, kv_heads, kv_heads))

    def with_gradient(program):
        return jax.value_and_grad(lambda q, k, v, ranges: jnp.sum(program(q, k, v, ranges)), (0, 1, 2))

    lines = []
    for row, ranges_4T in ranges_of(tokens).items():
        functions = {}
        for name, program in programs(row, tokens, size**-0.5).items():
            functions |= {(name, "forward"): program, (name, "with gradient"): with_gradient(program)}
        ranges = attention.Ranges(*(jnp.asarray(x)[None] for x in ranges_4T))
        lines += results(row, visible_share(ranges_4T), bench.by_turns(functions, (q, k, v, ranges), _REPEATS.value))
    title = f"{tokens:,} tokens, {heads} heads on {kv_heads} of size {size}, on {jax.devices()[0].device_kind}"
    head = ("row", "program", "pass", "visible", "ms", "CPU ms", "temp MiB", "ms / chunked", "CPU / chunked")
    metrics.table(title, head, [tuple(line.values()) for line in lines])
    metrics.finish({"rows": lines})


if __name__ == "__main__":
    cli.run(main, FLAGS)
