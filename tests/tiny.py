"""A tiny decoder whose weights numpy makes (nothing to compile), and the tool-call task around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import rollout, sample
from rsi_jax.envs import tool_calls
from rsi_jax.model import chat, tokenizer, transformer


def config(**changes) -> transformer.Config:
    """One layer of width 8 with grouped heads, a vocabulary of 64; `changes` are fields of the Config."""
    sizes = dict(vocab=64, width=8, layers=1, heads=2, kv_heads=1, head_size=4, ffn=12)
    return transformer.Config(**(sizes | changes))


@functools.cache
def _shapes(config: transformer.Config):
    return jax.eval_shape(functools.partial(transformer.init, config), jax.random.key(0))


def params(config: transformer.Config, seed: int = 0, gain: float = 1.5):
    """Random weights of the tree that `transformer.init` makes, larger than its own so that predictions differ."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        x = rng.normal(size=leaf.shape)
        if jax.tree_util.keystr(path).endswith("['scale']"):
            return jnp.asarray(1 + 0.1 * x, jnp.float32)
        return jnp.asarray(gain * x * config.width**-0.5, jnp.float32)

    return jax.tree_util.tree_map_with_path(one, _shapes(config))


def leaves(tree) -> dict[str, np.ndarray]:
    """The arrays of a tree by their path, on the host."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in found}


def assert_close(a, b, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Two trees of arrays are the same, leaf by leaf; without tolerances to the bit."""
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=atol, err_msg=name)


def copy(tree):
    """A copy that an update may consume (it donates its state)."""
    return jax.tree.map(jnp.copy, tree)


ENV = tool_calls.make(horizon=6, slack=2)
CHAT = chat.word_chat(tokenizer.WordTokenizer(ENV.words()))
STOPS = tuple(sorted(CHAT.stop_ids))


def sampler(env=ENV, *, capacity: int = 64, slots: int = 4, max_tokens: int = 3, **changes) -> rollout.Sampler:
    """A sampler of the tiny model over an environment that speaks the words of the tool-call task."""
    sampling = sample.Sampling(max_tokens=max_tokens, stop_ids=STOPS)
    model = config(vocab=CHAT.tokenizer.vocab_size, **changes)
    return rollout.Sampler(env, CHAT, model, sampling, capacity, slots)


def talker(config: transformer.Config, seed: int = 0):
    """Weights of a policy that ends about every third message within three tokens (a bold word, said half the time)."""
    made = params(config, seed)
    made["embed"]["embedding"] = made["embed"]["embedding"].at[CHAT.stop_id].multiply(4.0)
    return made
