"""Times one update over one very long rollout with many hints, and fits its memory over the length.

python -m experiments.bench_context --tokens=131072 --hints=64

The update is that of training: policy gradient and full-vocabulary divergence from a live teacher on every span, two
clipped gradients, AdamW. Random weights: 4 layers of which 2 see everything and 2 a window of 1,024, 2 query heads of
64, 32,768 words; layers are recomputed in the backward pass except for attention. Hints of 32 tokens, each before a
turn of 128; random advantages. The rollout is scored first, for its log-probs, and that is timed apart.
The fit: the update is compiled for --fit lengths, with hints in proportion; bytes = slope * tokens + intercept, by
least squares; error is the greatest distance from it over the measured bytes.
stdout ends with one JSON line: rows of tokens, hints, minutes (wall), cpu_minutes, score_minutes, peak_gib (resident
set of this process), temp_gib (of the program, from the compiler); fit of bytes_per_token, intercept_gib, error.
"""

import resource
import time

import numpy as np

from experiments import bench, cli

FLAGS = cli.Flags()
_TOKENS = FLAGS.integer("tokens", 131_072, "tokens of the rollout", lower_bound=1024)
_HINTS = FLAGS.integer("hints", 64, "hints, evenly spaced", lower_bound=1)
_FIT = FLAGS.list("fit", ["16384", "32768", "65536", "131072"], "lengths to compile for the fit of memory")
_VOCAB = FLAGS.integer("vocab", 32_768, "words", lower_bound=2)
_REMAT = FLAGS.enum("remat", "attention", ["none", "attention", "layer"], "what the backward pass computes again")

HINT, SPAN, HEAD, WINDOW = 32, 128, 64, 1024
GIB = 2**30


def program(vocab: int, remat: str):
    """The model and the update: (config, optimizer, update)."""
    import optax

    from rsi_jax import optim
    from rsi_jax.model import transformer
    from rsi_jax.train import update

    config = transformer.Config(
        vocab=vocab, width=2 * HEAD, layers=4, heads=2, kv_heads=1, head_size=HEAD, ffn=6 * HEAD,
        window=WINDOW, global_every=2,
    )  # fmt: skip
    objective = update.Objective(teacher="live", span=SPAN, remat=transformer.Remat(remat))
    optimizer = optim.make("adamw", optax.constant_schedule(1e-4))
    return config, optimizer, update.make_update(config, objective, optimizer)


def batch(tokens: int, hints: int, vocab: int):
    """The rollout and its credit: random advantages on the turns, every view with weight 1."""
    from rsi_jax import base

    rollout = bench.rollout(tokens, hints, vocab=vocab, hint=HINT, span=SPAN)
    adv_BT = np.random.default_rng(1).normal(size=(1, tokens)).astype(np.float32) * np.asarray(rollout.mask_BT)
    return rollout, base.Credit(adv_BT, None, np.ones(hints, np.float32), base.Divergence("forward_kl"))


def fresh(config, optimizer):
    """The state at the first update."""
    import jax
    import jax.numpy as jnp

    from rsi_jax import base
    from rsi_jax.feedback import schedule
    from rsi_jax.model import transformer

    params = transformer.init(config, jax.random.key(0))
    return base.TrainState(jnp.int32(0), params, optimizer.init(params), aux=schedule.init())


def temp_bytes(tokens: int, hints: int, vocab: int, remat: str) -> int:
    """Compiles the update without running it: bytes beside its arguments."""
    import jax

    config, optimizer, update = program(vocab, remat)
    state = jax.eval_shape(lambda: fresh(config, optimizer))
    compiled = update.lower(state, *batch(tokens, hints, vocab)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def fit(tokens: np.ndarray, bytes_: np.ndarray) -> dict[str, float]:
    """Fits a line: bytes per token, intercept, and the greatest relative error."""
    slope, intercept = np.polyfit(tokens, bytes_, 1)
    error = np.max(np.abs(slope * tokens + intercept - bytes_) / bytes_)
    return {"bytes_per_token": float(slope), "intercept_gib": float(intercept) / GIB, "error": float(error)}


def run(tokens: int, hints: int, vocab: int, remat: str) -> dict[str, float]:
    """Scores the rollout and makes the update once."""
    import jax

    from rsi_jax import annotate

    config, optimizer, update = program(vocab, remat)
    state, (rollout, credit) = fresh(config, optimizer), batch(tokens, hints, vocab)
    begun = time.perf_counter()
    logp_BT, _ = jax.block_until_ready(annotate.score_rollout(state.params, rollout, config=config))
    score_s, rollout = time.perf_counter() - begun, rollout.replace(logp_BT=logp_BT)
    compiled = update.lower(state, rollout, credit).compile()
    begun, cpu = time.perf_counter(), time.process_time()
    state, found = jax.block_until_ready(compiled(state, rollout, credit))
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(found)):
        raise FloatingPointError(f"the update is not finite: {found}")
    return {
        "tokens": tokens,
        "hints": hints,
        "minutes": wall_s / 60,
        "cpu_minutes": cpu_s / 60,
        "score_minutes": score_s / 60,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "temp_gib": compiled.memory_analysis().temp_size_in_bytes / GIB,
    } | {f"metrics/{name}": float(found[name]) for name in ("ratio_max", "divergence", "grad_norm/feedback")}


def main(_) -> None:
    from rsi_jax import base, metrics

    tokens, hints, vocab, remat = _TOKENS.value, _HINTS.value, _VOCAB.value, _REMAT.value
    if tokens < hints * (SPAN + 1):
        raise base.InputError(f"--tokens={tokens} has no room for --hints={hints} turns of {SPAN} tokens")
    lengths = np.array([int(x) for x in _FIT.value])
    measured = []
    for length in lengths:
        measured.append(temp_bytes(int(length), max(1, int(length) * hints // tokens), vocab, remat))
        print(f"{length:,} tokens: {measured[-1] / GIB:.2f} GiB beside the arguments", flush=True)
    line = fit(lengths, np.array(measured)) if len(lengths) > 1 else {}
    row = run(tokens, hints, vocab, remat)
    metrics.table("one update", list(row), [list(row.values())])
    if line:
        metrics.table("memory of the update: bytes = slope * tokens + intercept", list(line), [list(line.values())])
    metrics.finish({"rows": [row], "fit": line, "fit_tokens": lengths.tolist(), "fit_bytes": measured})


if __name__ == "__main__":
    cli.run(main, FLAGS)
