"""Checks the kernels on the accelerator of this machine: right first, then how fast; skipped with a reason elsewhere.

python -m experiments.device_check
python -m experiments.device_check --only=attention

Right: every implementation of every op on fresh random inputs of odd sizes against float64 on the host, values and
gradients, while the device's free memory is filled with NaN, so that what a kernel forgets to write is found. Fast:
rates against two ceilings measured in the same run, a copy and a bfloat16 matmul, and beside cuDNN and the plain form
where these run. Nothing is claimed of a device that is not there. Under 5 minutes on one accelerator.

stdout ends with one JSON line: device, jax, seed, checks [{op, case, dtype, error, tolerance, ok}], ceilings
{copy_gb_s, matmul_tflop_s}, rates [{op, case, ms, tflop_s, share}], failed; or skipped (the reason). Exit code 1 when a
check failed.
"""

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from experiments import cli

FLAGS = cli.Flags()
_ONLY = FLAGS.list("only", [], "ops to check: attention, token_logprob, divergence (default: all)")
_RATES = FLAGS.boolean("rates", True, "measure rates too")
_SEED = FLAGS.integer("seed", -1, "of the inputs; -1: a fresh one, named in the result", lower_bound=-1)

OPS = ("attention", "token_logprob", "divergence")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # of the greatest number; sums and softmax are float32 in both
# Rows, queries, heads, kv heads, head size, soft cap; odd numbers of queries fill no tile.
SHAPES = ((2, 515, 8, 2, 64, 0.0), (1, 1030, 4, 4, 128, 0.0), (1, 301, 6, 3, 64, 20.0))
# On these platforms; those of another one raise, and are not tried.
ATTENTION = {"gpu": ("mosaic_gpu", "chunked"), "tpu": ("tpu", "chunked"), "cpu": ("chunked",)}
DTYPES = {"mosaic_gpu": ("bfloat16",)}  # by implementation; others take both


def poison(platform: str) -> None:
    """Fills a GiB of an accelerator with NaN and gives it back, so that an output that is not written shows."""
    import jax
    import jax.numpy as jnp

    if platform != "cpu":
        jax.block_until_ready([jnp.full((2**26,), jnp.nan, jnp.float32) for _ in range(4)])


def branch_ranges(rng, rows: int, queries: int):
    """Key ranges as packed rows have them: a causal trunk, branches that fork off it, and padding that sees nothing."""
    import numpy as np

    query = np.arange(queries)
    lo1, hi1, lo2, hi2 = (np.zeros((rows, queries), np.int32) for _ in range(4))
    for b in range(rows):
        trunk = int(rng.integers(queries // 3, 2 * queries // 3))
        edges = np.sort(rng.choice(np.arange(trunk, queries), 4, replace=False))
        hi2[b] = np.where(query < trunk, query + 1, 0)
        for first, last in zip(edges[:-1], edges[1:], strict=True):
            mine = (query >= first) & (query < last)
            hi1[b], lo2[b] = np.where(mine, rng.integers(1, trunk), hi1[b]), np.where(mine, first, lo2[b])
            hi2[b] = np.where(mine, query + 1, hi2[b])
    return lo1, hi1, lo2, hi2


def _judged(op: str, case: str, dtype: str, found: Mapping[str, Any], true: Mapping[str, Any]) -> dict[str, Any]:
    from experiments import device_oracles

    errors = {name: device_oracles.relative_error(found[name], true[name]) for name in true}
    worst = max(errors, key=lambda name: errors[name])
    said = {"op": op, "case": case, "dtype": dtype, "worst": worst, "error": errors[worst]}
    return said | {"tolerance": TOLERANCE[dtype], "ok": errors[worst] <= TOLERANCE[dtype]}


def check_attention(platform: str, seed: int) -> Iterator[dict[str, Any]]:
    """Every implementation of the platform, by shape and dtype."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments import device_oracles
    from rsi_jax.kernels import attention

    cases = [(i, *shape, dtype) for i, shape in enumerate(SHAPES) for dtype in ("float32", "bfloat16")]
    for index, B, Q, H, J, C, cap, dtype in cases:
        rng = np.random.default_rng((seed, index))
        sizes = ((B, Q, H, C), (B, Q, J, C), (B, Q, J, C), (B, Q, H, C))
        q, k, v, dout = (jnp.asarray(rng.normal(size=size), dtype) for size in sizes)
        dlse = jnp.asarray(rng.normal(size=(B, Q, H)), jnp.float32)
        ranges = attention.Ranges(*map(jnp.asarray, branch_ranges(rng, B, Q)))
        knobs = {"scale": C**-0.5, "soft_cap": cap}
        true = device_oracles.attention(q, k, v, ranges, dout, dlse, **knobs)

        def both(q, k, v, ranges, dout, dlse, *, name, knobs=knobs):
            attend = functools.partial(attention.attention, implementation=name, return_lse=True, **knobs)
            (out, lse), pull = jax.vjp(lambda q, k, v: attend(q, k, v, ranges), q, k, v)
            # A query that sees nothing passes no gradient, whatever its cotangents.
            dq, dk, dv = pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0)))
            return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

        for name in (one for one in ATTENTION[platform] if dtype in DTYPES.get(one, TOLERANCE)):
            poison(platform)
            found = jax.device_get(jax.jit(functools.partial(both, name=name))(q, k, v, ranges, dout, dlse))
            yield _judged("attention", f"{name} {B}x{Q} H{H} J{J} C{C} cap{cap:g}", dtype, found, true)


def check_vocabulary(op: str, platform: str, seed: int) -> Iterator[dict[str, Any]]:
    """The log-prob op and the forward KL, chunked, by dtype."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments import device_oracles
    from rsi_jax.kernels import divergence, token_logprob

    N, D, V = 777, 192, 5003
    for dtype in ("float32", "bfloat16"):
        rng = np.random.default_rng((seed, OPS.index(op)))
        hidden, other = (jnp.asarray(rng.normal(size=(N, D)), dtype) for _ in range(2))
        words = jnp.asarray(rng.normal(size=(D, V)) * D**-0.5, dtype)
        target = jnp.asarray(rng.integers(0, V, N), jnp.int32)
        one, two = (jnp.asarray(rng.normal(size=N), jnp.float32) for _ in range(2))

        def scores(hidden, words, other, target, one, two):
            if op == "token_logprob":
                call = functools.partial(token_logprob.token_logprob, target_N=target, chunk=256)
                (logp, entropy), pull = jax.vjp(lambda h, w: call(h, w)[:2], hidden, words)
                dhidden, dunembed = pull((one, two))
                return {"logp": logp, "entropy": entropy, "dhidden": dhidden, "dunembed": dunembed}
            kl, pull = jax.vjp(lambda h, w: divergence.divergence(h, w, other, words, target, chunk=256), hidden, words)
            dhidden, dunembed = pull(one)
            return {"kl": kl, "dhidden": dhidden, "dunembed": dunembed}

        poison(platform)
        found = jax.device_get(jax.jit(scores)(hidden, words, other, target, one, two))
        if op == "token_logprob":
            true = device_oracles.token_logprob(hidden, words, target, one, two)
        else:
            true = device_oracles.forward_kl(hidden, words, other, words, one)
        yield _judged(op, f"chunked N{N} D{D} V{V}", dtype, found, true)


def checks(op: str, platform: str, seed: int) -> Iterator[dict[str, Any]]:
    """All checks of an op."""
    return check_attention(platform, seed) if op == "attention" else check_vocabulary(op, platform, seed)


def main(_) -> None:
    import jax

    from experiments import device_rates
    from rsi_jax import metrics

    device, names = jax.devices()[0], cli.chosen(_ONLY.value, OPS, "only")
    seed = _SEED.value if _SEED.value >= 0 else int.from_bytes(os.urandom(4))
    about = {"device": device.device_kind, "jax": jax.__version__, "seed": seed}
    if device.platform == "cpu":
        print("skipped: no accelerator here, jax sees CPUs only")
        metrics.finish(about | {"skipped": "no accelerator here, jax sees CPUs only"})
        return
    platform = "tpu" if device.platform == "tpu" else "gpu"
    found = [row for op in names for row in checks(op, platform, seed)]
    columns = ("op", "case", "dtype", "worst", "error", "tolerance", "ok")
    metrics.table(f"against float64, on {device.device_kind}", columns, [[row[c] for c in columns] for row in found])
    ceilings, rates = {}, []
    if _RATES.value:
        ceilings = device_rates.ceilings()
        rates = device_rates.rates(names, ATTENTION[platform], ceilings)
        columns = ("op", "case", "ms", "tflop_s", "share")
        metrics.table(f"rates; ceilings {ceilings}", columns, [[row[c] for c in columns] for row in rates])
    failed = sum(not row["ok"] for row in found)
    metrics.finish(about | {"checks": found, "ceilings": ceilings, "rates": rates, "failed": failed})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    cli.run(main, FLAGS)
