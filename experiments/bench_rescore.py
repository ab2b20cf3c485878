"""Times re-reading a rollout once per hint: all branches in one packed row, against one forward per hint.

python -m experiments.bench_rescore --tokens=8192 --hints=32

A model of random weights, two layers; hints of 32 tokens, evenly spaced over the rollout, each before a span of 128
tokens. What is timed: the student's forward over the rollout and the teacher's states on every span, the same weights.
  packed         the rollout and its branches in one forward (feedback.views)
  per hint       the rollout, and then prefix + hint + span from the start for each hint
  prefix cache   the rollout into a KV cache, and then hint + span behind the cached prefix, one hint after the other
Forwards of per hint are timed at every --every-th hint, each at its own length (the median of --repeats runs after the
first), and the rest are scaled by the matmul FLOPs of each; so are those of prefix cache, whose filling counts as the
student's forward.
stdout ends with one JSON line: rows of tokens, hints, speedup (CPU seconds of per hint over packed), flop_bound (the
same ratio in matmul FLOPs: the most that packing can win), share (speedup / flop_bound), speedup_vs_prefix_cache,
memory_ratio (temporary bytes of packed over the longest forward per hint), max_abs_diff (of the spans' states, over
the hints that were timed), wall_s and cpu_s of each.
"""

from typing import Any

import numpy as np

from experiments import bench, cli

FLAGS = cli.Flags()
_TOKENS = FLAGS.list("tokens", ["8192", "32768"], "tokens of the rollout; several rows: several numbers")
_HINTS = FLAGS.list("hints", ["32", "64"], "hints of each row")
_WIDTH = FLAGS.integer("width", 256, "width of the model", lower_bound=64)
_EVERY = FLAGS.integer("every", 8, "one forward per hint is timed at every n-th hint", lower_bound=1)
_REPEATS = FLAGS.integer("repeats", 3, "timed runs of each program", lower_bound=1)

HINT, SPAN, HEAD, VOCAB, LAYERS, MULTIPLE, CHUNK = 32, 128, 64, 512, 2, 64, 1024


def model_of(width: int):
    """The model: heads of 64, as many kv heads, SwiGLU of three times the width."""
    from rsi_jax.model import transformer

    heads = width // HEAD
    return transformer.Config(
        vocab=VOCAB, width=width, layers=LAYERS, heads=heads, kv_heads=heads, head_size=HEAD, ffn=3 * width
    )


def flops(config, queries: int, keys_before: int) -> float:
    """Matmul FLOPs of a forward over `queries` tokens that attend causally to each other and to `keys_before` more."""
    projections = 2 * config.width * config.head_size * (2 * config.heads + 2 * config.kv_heads)
    per_token = projections + 6 * config.width * config.ffn
    pairs = queries * keys_before + queries * (queries + 1) / 2
    return config.layers * (queries * per_token + 4 * config.heads * config.head_size * pairs)


def bound(config, tokens: int, hints: int) -> tuple[float, float, np.ndarray, np.ndarray]:
    """FLOPs: (student, packed branches, of each forward per hint, of each branch behind its prefix)."""
    student, branch = flops(config, tokens, 0), HINT + SPAN
    at_K = bench.places(tokens, hints, SPAN)
    each_K = np.array([flops(config, int(at) + branch, 0) for at in at_K])
    behind_K = np.array([flops(config, branch, int(at)) for at in at_K])
    return student, float(behind_K.sum()), each_K, behind_K


def apart(config, params, rollout, k: int):
    """One forward per hint: (function, arguments) that read hint k's row from its first token on; the span's states."""
    import jax.numpy as jnp

    from rsi_jax.kernels import attention
    from rsi_jax.model import transformer

    v = rollout.views
    at, trunk = int(v.insert_at_K[k]), np.asarray(rollout.tokens_BT[0])
    row = np.concatenate([trunk[:at], v.hint_KN[k], trunk[at : at + SPAN]])
    padded = np.zeros(-(-len(row) // MULTIPLE) * MULTIPLE, np.int32)
    padded[: len(row)] = row

    def read(params, tokens_T, length):
        positions_BT = jnp.arange(len(padded))[None]
        ranges = attention.causal_ranges(jnp.reshape(length, 1), len(padded))
        hidden_BTD = transformer.hidden_states(params, config, transformer.Rows(tokens_T[None], positions_BT, ranges))
        return hidden_BTD[0, len(row) - SPAN - 1 : len(row) - 1]

    return read, (params, padded, np.int32(len(row)))


def cache_of(config, params, rollout):
    """The sampler's KV cache, full of the rollout, with room for a hint."""
    import jax
    import jax.numpy as jnp

    from rsi_jax.model import transformer

    tokens = rollout.tokens_BT.shape[1]
    cache, extend = transformer.new_cache(config, 1, tokens + HINT), jax.jit(transformer.extend, static_argnums=1)
    for first in range(0, tokens, CHUNK):
        chunk = np.zeros((1, CHUNK), np.int32)
        part = np.asarray(rollout.tokens_BT)[:, first : first + CHUNK]
        chunk[:, : part.shape[1]] = part
        _, cache = extend(params, config, chunk, jnp.array([first]), jnp.array([part.shape[1]]), cache)
    return cache


def behind(config, params, rollout, cache, k: int):
    """Behind a cached prefix: (function, arguments) that read hint k and its span only; the span's states.

    The cache is cut to the prefix and the branch, so that no key is read in vain.
    """
    import jax.numpy as jnp

    from rsi_jax.model import transformer

    v = rollout.views
    at, trunk = int(v.insert_at_K[k]), np.asarray(rollout.tokens_BT[0])
    row = np.concatenate([v.hint_KN[k], trunk[at : at + SPAN]])[None]
    cut = [tuple(x[:, :, : at + HINT + SPAN] for x in layer) for layer in cache]

    def read(params, cache, row_BO):
        held, used = jnp.array([at]), jnp.array([HINT + SPAN])
        hidden_BOD, _ = transformer.extend(params, config, row_BO, held, used, cache)
        return hidden_BOD[0, HINT - 1 : HINT + SPAN - 1]

    return read, (params, cut, row)


def worst(timings, states_KUD, chosen) -> float:
    """Greatest difference of the spans' states from those of the packed row."""
    return max(float(np.abs(np.asarray(t.result) - states_KUD[k]).max()) for t, k in zip(timings, chosen, strict=True))


def measure_row(tokens: int, hints: int, width: int, every: int, repeats: int) -> dict[str, Any]:
    """Measures one row of the table."""
    import jax

    from rsi_jax import annotate
    from rsi_jax.feedback import views as views_lib
    from rsi_jax.model import transformer

    config = model_of(width)
    params, rollout = (
        transformer.init(config, jax.random.key(0)),
        bench.rollout(tokens, hints, vocab=VOCAB, hint=HINT, span=SPAN),
    )

    def packed(params, rollout):
        hidden_RPD, branch_RQD = views_lib.read(params, config, rollout)
        return hidden_RPD, views_lib.span_states(hidden_RPD, branch_RQD, rollout, SPAN)

    ours = bench.timed(packed, (params, rollout), repeats)
    student = bench.timed(lambda p, r: annotate.hidden_states(p, config, r), (params, rollout), repeats)
    chosen = list(range(every // 2 if hints > every else 0, hints, every))
    each = [bench.timed(*apart(config, params, rollout, k), repeats) for k in chosen]
    cache = cache_of(config, params, rollout)
    tails = [bench.timed(*behind(config, params, rollout, cache, k), repeats) for k in chosen]
    trunk, branches, each_K, behind_K = bound(config, tokens, hints)

    def seconds(name: str) -> dict[str, float]:
        def total(timings, flops_K):
            return (
                getattr(student, name) + sum(getattr(t, name) for t in timings) * flops_K.sum() / flops_K[chosen].sum()
            )

        return {"packed": getattr(ours, name), "per_hint": total(each, each_K), "prefix_cache": total(tails, behind_K)}

    cpu, limit, states_KUD = seconds("cpu_s"), (trunk + each_K.sum()) / (trunk + branches), np.asarray(ours.result[1])
    speedup = cpu["per_hint"] / cpu["packed"]
    return {
        "tokens": tokens,
        "hints": hints,
        "speedup": speedup,
        "flop_bound": limit,
        "share": speedup / limit,
        "speedup_vs_prefix_cache": cpu["prefix_cache"] / cpu["packed"],
        "memory_ratio": ours.temp_bytes / max(t.temp_bytes for t in each),
        "max_abs_diff": max(worst(each, states_KUD, chosen), worst(tails, states_KUD, chosen)),
        "cpu_s": cpu,
        "wall_s": seconds("wall_s"),
    }


def main(_) -> None:
    from rsi_jax import base, metrics

    try:
        sizes = list(zip(map(int, _TOKENS.value), map(int, _HINTS.value), strict=True))
    except ValueError as error:
        raise base.InputError(f"--tokens and --hints want as many whole numbers each ({error})") from error
    for tokens, hints in sizes:
        if tokens < SPAN + hints:
            raise base.InputError(f"--tokens={tokens} has no room for --hints={hints} before spans of {SPAN}")
    rows = [measure_row(*size, _WIDTH.value, _EVERY.value, _REPEATS.value) for size in sizes]
    names = (
        "tokens",
        "hints",
        "speedup",
        "flop_bound",
        "share",
        "speedup_vs_prefix_cache",
        "memory_ratio",
        "max_abs_diff",
    )
    table = [[row[name] for name in names] for row in rows]
    metrics.table(f"re-reading once per hint, width {_WIDTH.value}, {LAYERS} layers", names, table)
    seconds = [[row["tokens"], kind, row["cpu_s"][kind], row["wall_s"][kind]] for row in rows for kind in row["cpu_s"]]
    metrics.table("seconds", ("tokens", "how", "CPU", "wall"), seconds)
    metrics.finish({"rows": rows})


if __name__ == "__main__":
    cli.run(main, FLAGS)
