"""How fast the ops are on an accelerator, beside two ceilings measured there; for `experiments.device_check`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import bench

REPEATS = 10
TOKENS, HEADS, HEAD_SIZE = 16_384, 16, 128  # attention: causal, bfloat16, one row
NAIVE = 4_096  # tokens up to which the plain form, O(T^2), is timed too
ROWS, WIDTH, WORDS = 8_192, 4_096, 131_072  # the log-prob op


def ceilings() -> dict[str, float]:
    """What the device does at best: GB/s of a copy (read and write), TFLOP/s of a bfloat16 matmul."""
    import jax.numpy as jnp

    bytes_, size = 2**30, 8_192
    copy = bench.timed(lambda x: x + 1, (jnp.zeros(bytes_ // 2, jnp.bfloat16),), REPEATS)
    square = jnp.ones((size, size), jnp.bfloat16)
    product = bench.timed(lambda x, y: x @ y, (square, square), REPEATS)
    return {"copy_gb_s": 2 * bytes_ / copy.wall_s / 1e9, "matmul_tflop_s": 2 * size**3 / product.wall_s / 1e12}


def _row(op: str, case: str, function: Callable[..., Any], args: tuple, flops: float, peak: float) -> dict[str, Any]:
    """A timed program; in the place of its time, in a line, why it does not run here."""
    try:
        ms = 1e3 * bench.timed(function, args, REPEATS).wall_s
    except Exception as error:  # whatever a compiler or a library says of a shape that it cannot take is the result
        said = str(error).strip().partition("\n")[0][:100] or type(error).__name__
        return {"op": op, "case": case, "ms": said, "tflop_s": None, "share": None}
    rate = flops / (ms * 1e-3) / 1e12
    return {"op": op, "case": case, "ms": ms, "tflop_s": rate, "share": rate / peak}


def _with_gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward: the output's sum, so that neither is left out."""
    import jax

    def both(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    return both


def attention_rates(implementations: Sequence[str], peak: float) -> list[dict[str, Any]]:
    """Causal attention of one long row: ours, cuDNN's, and the plain form on a shorter row."""
    import jax
    import jax.numpy as jnp

    from rsi_jax.kernels import attention

    def form(name: str, tokens: int) -> Callable[..., Any]:
        if name in ("cudnn", "xla"):
            return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)
        ranges = attention.causal_ranges(jnp.full((1,), tokens), tokens)
        knobs = {"scale": HEAD_SIZE**-0.5, "implementation": name}
        return lambda q, k, v: attention.attention(q, k, v, ranges, **knobs)

    rows = []
    for name, tokens in [*((name, TOKENS) for name in (*implementations, "cudnn")), ("xla", NAIVE)]:
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, dout = (jax.random.normal(key, (1, tokens, HEADS, HEAD_SIZE), jnp.bfloat16) for key in keys)
        attend, forward = form(name, tokens), 2 * tokens**2 * HEADS * HEAD_SIZE  # half of 4 T^2 H C: causal
        case = f"{name} causal T{tokens} H{HEADS} C{HEAD_SIZE}"
        rows.append(_row("attention", f"{case} forward", attend, (q, k, v), forward, peak))
        both = _row("attention", f"{case} both", _with_gradient(attend), (q, k, v, dout), 3.5 * forward, peak)
        rows.append(both)
        if isinstance(both["ms"], float) and isinstance(rows[-2]["ms"], float):  # the backward pass alone: 2.5 forward
            ms = both["ms"] - rows[-2]["ms"]
            rate = 2.5 * forward / (ms * 1e-3) / 1e12
            rows.append(
                {"op": "attention", "case": f"{case} backward", "ms": ms, "tflop_s": rate, "share": rate / peak}
            )
    return rows


def vocabulary_rates(op: str, peak: float) -> list[dict[str, Any]]:
    """Log-probs with entropy, or the forward KL, by chunks, forward and backward: 8 T D V and 14 T D V."""
    import jax
    import jax.numpy as jnp

    from rsi_jax.kernels import divergence, token_logprob

    keys = jax.random.split(jax.random.key(0), 3)
    hidden, other = (jax.random.normal(key, (ROWS, WIDTH), jnp.bfloat16) for key in keys[:2])
    words = jax.random.normal(keys[2], (WIDTH, WORDS), jnp.bfloat16) * WIDTH**-0.5
    target = jnp.arange(ROWS, dtype=jnp.int32)
    one, products = jnp.ones(ROWS), {"token_logprob": 4, "divergence": 6}[op]

    def both(hidden, words, other, target, one):
        if op == "token_logprob":
            value, pull = jax.vjp(
                lambda h, w: token_logprob.token_logprob(h, w, target, chunk=4096).logp_N, hidden, words
            )
        else:
            value, pull = jax.vjp(
                lambda h, w: divergence.divergence(h, w, other, words, target, chunk=4096), hidden, words
            )
        return value, pull(one)

    flops = 2 * products * ROWS * WIDTH * WORDS
    args = (hidden, words, other, target, one)
    return [_row(op, f"chunked T{ROWS} D{WIDTH} V{WORDS} both", both, args, flops, peak)]


def rates(ops: Sequence[str], implementations: Sequence[str], ceilings: Mapping[str, float]) -> list[dict[str, Any]]:
    """The rates of the ops, and the share of the measured matmul ceiling that each reaches."""
    peak, found = ceilings["matmul_tflop_s"], []
    for op in ops:
        found += attention_rates(implementations, peak) if op == "attention" else vocabulary_rates(op, peak)
    return found
