"""Times log-prob, entropy and divergence from hidden states: chunks that recompute against logits that are kept.

python -m experiments.bench_logprob --vocab=32768,151936

Value and gradient (of the hidden states and the unembedding) of sum logp + sum entropy on random normal states,
float32. Programs: the logits of all tokens at once with jax's log_softmax; the same with optax's cross entropy (no
entropy); jax.lax.map over chunks of 128 tokens under jax.checkpoint; the op of this repository; and its divergence
(forward KL over the whole vocabulary, unembedding shared). They take turns, once to warm up and then --repeats times;
a time is the median. CPU seconds are those of the process: what other work on the machine leaves alone. Memory is
XLA's temporary buffers; the gradient of the unembedding is an output and not among them.
stdout ends with one JSON line: rows, one per vocabulary: tokens, width, vocab, time_ratio (CPU seconds, op / logits at
once), memory_ratio (temporary bytes, op / logits at once), checkpoint_ratio (CPU seconds, op / checkpointed chunks),
divergence_ratio (CPU seconds, divergence / op), max_abs_err (logp, entropy and both gradients of the first 64 tokens in
chunks of 16, against float64).
"""

import numpy as np

from experiments import bench, cli

FLAGS = cli.Flags()
_TOKENS = FLAGS.integer("tokens", 4096, "tokens scored", lower_bound=1)
_WIDTH = FLAGS.integer("width", 256, "width of a hidden state", lower_bound=1)
_VOCAB = FLAGS.list("vocab", ["32768"], "sizes of the vocabulary, comma-separated")
_CHUNK = FLAGS.integer("chunk", 0, "tokens of a chunk of the op; 0 = automatic", lower_bound=0)
_REPEATS = FLAGS.integer("repeats", 3, "timed runs of each program", lower_bound=1)

CHECKED, CHECKED_CHUNK, CHECKPOINTED = 64, 16, 128  # tokens
AT_ONCE, OPTAX, CHECKPOINT, OP, DIVERGENCE = "logits at once", "optax, no entropy", "lax.map, checkpoint", "op", "KL op"


def states(tokens: int, width: int, vocab: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Draws (hidden_ND, unembed_DV, target_N, teacher_ND); logits have a spread of about 2."""
    rng = np.random.default_rng(seed)
    hidden_ND, noise_ND = rng.normal(size=(2, tokens, width)).astype(np.float32)
    unembed_DV = rng.normal(size=(width, vocab)).astype(np.float32) * np.float32(2.0 / np.sqrt(width))
    return hidden_ND, unembed_DV, rng.integers(0, vocab, tokens).astype(np.int32), hidden_ND + 0.3 * noise_ND


def programs(chunk: int):
    """The competitors by name: each (hidden_ND, unembed_DV, target_N, teacher_ND) -> the sum to be differentiated."""
    import jax
    import jax.numpy as jnp
    import optax

    from rsi_jax.kernels import divergence, token_logprob

    def at_once(hidden_ND, unembed_DV, target_N, _):
        logp_NV = jax.nn.log_softmax(hidden_ND @ unembed_DV)
        logp_N = jnp.take_along_axis(logp_NV, target_N[:, None], axis=1)[:, 0]
        return jnp.sum(logp_N) - jnp.sum(jnp.exp(logp_NV) * logp_NV)

    def by_optax(hidden_ND, unembed_DV, target_N, _):
        return -jnp.sum(optax.losses.softmax_cross_entropy_with_integer_labels(hidden_ND @ unembed_DV, target_N))

    def checkpointed(hidden_ND, unembed_DV, target_N, _):
        rows = min(CHECKPOINTED, len(hidden_ND))
        used = len(hidden_ND) // rows * rows  # the benchmark's sizes leave no remainder
        split = hidden_ND[:used].reshape(-1, rows, hidden_ND.shape[1]), target_N[:used].reshape(-1, rows)
        return jnp.sum(jax.lax.map(jax.checkpoint(lambda x: at_once(x[0], unembed_DV, x[1], None)), split))

    def op(hidden_ND, unembed_DV, target_N, _):
        scores = token_logprob.token_logprob(hidden_ND, unembed_DV, target_N, chunk=chunk)
        return jnp.sum(scores.logp_N) + jnp.sum(scores.entropy_N)

    def kl(hidden_ND, unembed_DV, target_N, teacher_ND):
        return jnp.sum(divergence.divergence(hidden_ND, unembed_DV, teacher_ND, unembed_DV, target_N, chunk=chunk))

    return {AT_ONCE: at_once, OPTAX: by_optax, CHECKPOINT: checkpointed, OP: op, DIVERGENCE: kl}


def in_float64(hidden_ND, unembed_DV, target_N):
    """The definition: (logp_N, entropy_N, gradient of the hidden states, gradient of the unembedding)."""
    hidden_ND, unembed_DV = np.float64(hidden_ND), np.float64(unembed_DV)
    logit_NV = hidden_ND @ unembed_DV
    logit_NV -= logit_NV.max(axis=1, keepdims=True)
    logp_NV = logit_NV - np.log(np.sum(np.exp(logit_NV), axis=1, keepdims=True))
    p_NV, at = np.exp(logp_NV), (np.arange(len(target_N)), target_N)
    entropy_N = -np.sum(p_NV * logp_NV, axis=1)
    slope_NV = -p_NV * (1.0 + logp_NV + entropy_N[:, None])
    slope_NV[at] += 1.0
    return logp_NV[at], entropy_N, slope_NV @ unembed_DV.T, hidden_ND.T @ slope_NV


def max_abs_err(hidden_ND, unembed_DV, target_N) -> float:
    """The largest difference of the op, in small chunks, from `in_float64`."""
    import jax
    import jax.numpy as jnp

    from rsi_jax.kernels import token_logprob

    @jax.jit
    def run(hidden_ND, unembed_DV):
        def total(hidden_ND, unembed_DV):
            scores = token_logprob.token_logprob(hidden_ND, unembed_DV, target_N, chunk=CHECKED_CHUNK)
            return jnp.sum(scores.logp_N) + jnp.sum(scores.entropy_N), scores[:2]

        slopes, scores = jax.grad(total, (0, 1), has_aux=True)(hidden_ND, unembed_DV)
        return *scores, *slopes

    found, want = run(hidden_ND, unembed_DV), in_float64(hidden_ND, unembed_DV, target_N)
    return max(float(np.max(np.abs(np.asarray(a) - b))) for a, b in zip(found, want, strict=True))


def measure(tokens: int, width: int, vocab: int, chunk: int, repeats: int) -> dict[str, float]:
    """Measures one vocabulary: prints its table and returns its row."""
    import jax

    from rsi_jax import metrics

    hidden_ND, unembed_DV, target_N, teacher_ND = drawn = states(tokens, width, vocab)
    graded = {name: jax.value_and_grad(program, (0, 1)) for name, program in programs(chunk).items()}
    found = bench.by_turns(graded, jax.device_put(drawn), repeats)
    base_s, base_bytes = found[AT_ONCE].cpu_s, found[AT_ONCE].temp_bytes
    rows = [
        (name, x.wall_s, x.cpu_s, x.temp_bytes / 2**20, x.cpu_s / base_s, x.temp_bytes / base_bytes)
        for name, x in found.items()
    ]
    title = f"{tokens:,} tokens, width {width}, {vocab:,} words on {jax.devices()[0].device_kind}"
    metrics.table(title, ("program", "wall, s", "CPU, s", "temp, MiB", "CPU ratio", "temp ratio"), rows)
    return {
        "tokens": tokens, "width": width, "vocab": vocab,
        "time_ratio": found[OP].cpu_s / base_s, "memory_ratio": found[OP].temp_bytes / base_bytes,
        "checkpoint_ratio": found[OP].cpu_s / found[CHECKPOINT].cpu_s,
        "divergence_ratio": found[DIVERGENCE].cpu_s / found[OP].cpu_s,
        "max_abs_err": max_abs_err(hidden_ND[:CHECKED], unembed_DV, target_N[:CHECKED]),
    }  # fmt: skip


def main(_) -> None:
    from rsi_jax import base, metrics

    if not all(text.isdecimal() and int(text) for text in _VOCAB.value):
        raise base.InputError(f"--vocab={','.join(_VOCAB.value)} must be positive integers")
    sizes = [int(text) for text in _VOCAB.value]
    rows = [measure(_TOKENS.value, _WIDTH.value, vocab, _CHUNK.value, _REPEATS.value) for vocab in sizes]
    metrics.finish({"rows": rows})


if __name__ == "__main__":
    cli.run(main, FLAGS)
