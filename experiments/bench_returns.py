"""Times returns, lambda-returns and GAE over one long trajectory: the associative scan against a loop over tokens.

python -m experiments.bench_returns

The trajectory is random: normal rewards and values, half of the tokens observations, discount .999, lambda .95. Both
programs are compiled; a time is the median of --repeats runs after the first.
stdout ends with one JSON line: tokens, gae_ms (associative scan), scan_ms (loop, the same GAE), max_difference (over
the three recursions, relative to the largest number of each).
"""

import statistics
import time

import numpy as np

from experiments import cli

FLAGS = cli.Flags()
_TOKENS = FLAGS.integer("tokens", 131_072, "tokens of the trajectory", lower_bound=1)
_REPEATS = FLAGS.integer("repeats", 50, "timed runs of each program", lower_bound=1)

DISCOUNT, LAMBDA, OBSERVED = 0.999, 0.95, 0.5


def trajectory(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draws (reward_T, discount_T, value_T, mask_T)."""
    rng = np.random.default_rng(seed)
    reward_T, value_T = rng.normal(size=(2, tokens)).astype(np.float32)
    return reward_T, np.full(tokens, DISCOUNT, np.float32), value_T, rng.random(tokens) >= OBSERVED


def loops():
    """The three recursions as loops over tokens, by name: the functions of rsi_jax.returns are held to them."""
    import jax
    import jax.numpy as jnp

    def backward(one):
        """Runs one(following value, following result, step) from the last token to the first; off-mask it waits."""

        def run(reward_T, discount_T, value_T, mask_T):
            def step(carry, x):
                value, keep = x[2], x[3]
                found = one(*carry, *x[:3])
                return (jnp.where(keep, value, carry[0]), jnp.where(keep, found, carry[1])), jnp.where(keep, found, 0.0)

            return jax.lax.scan(step, (0.0, 0.0), (reward_T, discount_T, value_T, mask_T), reverse=True)[1]

        return run

    return {
        "returns": backward(lambda v, total, r, g, _: r + g * total),
        "lambda-returns": backward(lambda v, total, r, g, _: r + g * ((1 - LAMBDA) * v + LAMBDA * total)),
        "gae": backward(lambda v, adv, r, g, own: r + g * v - own + g * LAMBDA * adv),
    }


def scans():
    """The same by rsi_jax.returns."""
    from rsi_jax import returns

    return {
        "returns": lambda r, g, v, m: returns.discounted_returns(r, g, m),
        "lambda-returns": lambda r, g, v, m: returns.lambda_returns(r, g, v, m, lambda_=LAMBDA),
        "gae": lambda r, g, v, m: returns.gae(r, g, v, m, lambda_=LAMBDA),
    }


def measure(function, columns, repeats: int) -> tuple[np.ndarray, float, float]:
    """Compiles and runs: (the result, seconds of the first call, median milliseconds of the later ones)."""
    import jax

    compiled, times = jax.jit(function), []
    for _ in range(1 + repeats):
        begun = time.perf_counter()
        result = jax.block_until_ready(compiled(*columns))
        times.append(time.perf_counter() - begun)
    return np.asarray(result), times[0], 1000 * statistics.median(times[1:])


def main(_) -> None:
    import jax

    from rsi_jax import metrics

    columns = jax.device_put(trajectory(_TOKENS.value))
    ours, theirs = scans(), loops()
    rows, differences, times = [], [], {}
    for name in ours:
        found, compile_s, ms = measure(ours[name], columns, _REPEATS.value)
        want, loop_compile_s, loop_ms = measure(theirs[name], columns, _REPEATS.value)
        differences.append(float(np.max(np.abs(found - want)) / max(1.0, np.max(np.abs(want)))))
        times[name] = ms, loop_ms
        rows.append((name, compile_s, ms, loop_compile_s, loop_ms, loop_ms / ms, differences[-1]))
    title = f"{_TOKENS.value:,} tokens on {jax.devices()[0].device_kind}"
    head = ("recursion", "scan: first, s", "scan, ms", "loop: first, s", "loop, ms", "loop / scan", "difference")
    metrics.table(title, head, rows)
    gae_ms, scan_ms = times["gae"]
    metrics.finish({"tokens": _TOKENS.value, "gae_ms": gae_ms, "scan_ms": scan_ms, "max_difference": max(differences)})


if __name__ == "__main__":
    cli.run(main, FLAGS)
