"""One decoder for every model here: GQA, RoPE, RMSNorm, SwiGLU; built-in tiny sizes, Llama, SmolLM2.

The modules are flax.nnx; the trainer sees pure functions of a params pytree (a nested dict of arrays):
`init` makes it, `hidden_states` reads whole rows, `branched_states` rows and what forks off them, `extend` appends
chunks to a KV cache.
Layers are unrolled and each has its own cache buffers: on CPU this decodes about twice as fast as a scan over a
stacked cache.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rsi_jax.kernels import attention as attention_op

Params = Any
Cache = list[tuple[jax.Array, jax.Array]]  # per layer: keys and values, each [B, J, S, C]


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a decoder. The defaults are the tiny built-in model.

    window: keys a query sees back, itself included (0 = all). global_every: with a window, every n-th layer sees all
    keys, the n-th first (0 = no layer). soft caps: 0 = none.
    head_size * heads need not equal width. value_head adds one scalar per token.
    attention: implementation of the attention op (kernels/attention).
    """

    vocab: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 16
    ffn: int = 192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True
    qk_norm: bool = False
    window: int = 0
    global_every: int = 0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    value_head: bool = False
    dtype: str = "float32"
    attention: str = "chunked"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"model.head_size={self.head_size} must be even (RoPE rotates pairs)")

    def windowed(self, layer: int) -> bool:
        """Whether layer 0, 1, ... sees the last `window` keys only."""
        return bool(self.window) and not (self.global_every and (layer + 1) % self.global_every == 0)


class Rows(NamedTuple):
    """Rows for the model to read: tokens, their positions inside their sequences, and the keys that each may see."""

    tokens_BT: jax.Array
    positions_BT: jax.Array
    ranges: attention_op.Ranges


REMATS = ("none", "layer", "attention")  # what the backward pass recomputes; see `Remat`


class Remat(NamedTuple):
    """What is kept of the forward pass for the backward pass, and where.

    keep: 'none' = all activations stay; 'layer' = a layer's input stays, the rest is computed again; 'attention' = its
      input and its attention's output stay: no attention is computed again, for twice the memory.
    offload: what is kept waits in the host's memory (needs keep != 'none'; no effect on a CPU).
    """

    keep: str = "none"
    offload: bool = False

    def wrap(self, call):
        """Makes a method of a layer recompute what is not kept.

        Raises: ValueError for an unknown choice, or an offload of everything.
        """
        if self.keep not in REMATS or (self.offload and self.keep == "none"):
            raise ValueError(f"remat {self} is none of {REMATS}, of which 'none' has no offload")
        if self.keep == "none":
            return call
        names = ["layer"] + ["attention"] * (self.keep == "attention")
        policies = jax.checkpoint_policies
        if self.offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[], names_which_can_be_offloaded=names,
                offload_src="device", offload_dst="pinned_host",
            )  # fmt: skip
        else:
            policy = policies.save_only_these_names(*names)
        return nnx.remat(call, policy=policy)


KEEP_ALL = Remat()


# Logical axes of each parameter, by the end of its path; sharding.py maps them to the mesh.
LOGICAL_AXES = {
    "embed/embedding": ("vocab", "embed"),
    "unembed/kernel": ("embed", "vocab"),
    "attention/q": ("embed", "heads", "head"),
    "attention/k": ("embed", "kv_heads", "head"),
    "attention/v": ("embed", "kv_heads", "head"),
    "attention/o": ("heads", "head", "embed"),
    "ffn/gate": ("embed", "ffn"),
    "ffn/up": ("embed", "ffn"),
    "ffn/down": ("ffn", "embed"),
    "value_head/kernel": ("embed", None),
    "value_head/bias": (None,),
    "scale": (None,),
}


def _normal(fan_in: int):
    return nnx.initializers.normal(stddev=fan_in**-0.5)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rope(x_BTHC, positions_BT, theta: float):
    """Rotates pairs (c, c + C/2) of each head by position * theta^(-2c/C); angles in float32.

    Source: Su et al. 2021 (arXiv 2104.09864), half-split layout as in Llama.
    """
    half = x_BTHC.shape[-1] // 2
    inverse = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT.astype(jnp.float32)[..., None, None] * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHC.dtype)


class Attention(nnx.Module):
    """Grouped-query attention by the two-key-range rule, over a whole row or over a cache."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c, init = config, _normal(config.width)
        self.q = nnx.Param(init(rngs.params(), (c.width, c.heads, c.head_size)))
        self.k = nnx.Param(init(rngs.params(), (c.width, c.kv_heads, c.head_size)))
        self.v = nnx.Param(init(rngs.params(), (c.width, c.kv_heads, c.head_size)))
        out = _normal(c.heads * c.head_size * 2 * c.layers)
        self.o = nnx.Param(out(rngs.params(), (c.heads, c.head_size, c.width)))
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_size, c.norm_eps), RMSNorm(c.head_size, c.norm_eps)
        self.config = config

    def _project(self, x_BTD, positions_BT):
        q = jnp.einsum("btd,dhc->bthc", x_BTD, self.q[...].astype(x_BTD.dtype))
        k = jnp.einsum("btd,djc->btjc", x_BTD, self.k[...].astype(x_BTD.dtype))
        v = jnp.einsum("btd,djc->btjc", x_BTD, self.v[...].astype(x_BTD.dtype))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        theta = self.config.rope_theta
        return rope(q, positions_BT, theta), rope(k, positions_BT, theta), v

    def _knobs(self):
        return {"scale": self.config.head_size**-0.5, "soft_cap": self.config.attention_soft_cap}

    def _out(self, out_BTHC):
        return jnp.einsum("bthc,hcd->btd", out_BTHC, self.o[...].astype(out_BTHC.dtype))

    def __call__(self, x_BTD, positions_BT, ranges, before=()):
        """Attends over the keys and values `before` and the row's own: (out, the row's own keys and values)."""
        q, *own = self._project(x_BTD, positions_BT)
        k, v = (jnp.concatenate(parts, axis=1) for parts in zip(before, own, strict=True)) if before else own
        out = attention_op.attention(q, k, v, ranges, implementation=self.config.attention, **self._knobs())
        return self._out(out), tuple(own)

    def extend(self, x_BOD, positions_BO, slots_BO, ranges, cache):
        """Writes keys and values at cache `slots_BO` (out of range = not written), then attends over the cache."""
        q, k, v = self._project(x_BOD, positions_BO)
        row_B1 = jnp.arange(x_BOD.shape[0])[:, None]
        k_BJSC = cache[0].at[row_B1, :, slots_BO].set(k, mode="drop")
        v_BJSC = cache[1].at[row_B1, :, slots_BO].set(v, mode="drop")
        out = attention_op.decode_attention(q, k_BJSC, v_BJSC, ranges, **self._knobs())
        return self._out(out), (k_BJSC, v_BJSC)


class SwiGLU(nnx.Module):
    """silu(x gate) * (x up) down."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        init = _normal(config.width)
        self.gate = nnx.Param(init(rngs.params(), (config.width, config.ffn)))
        self.up = nnx.Param(init(rngs.params(), (config.width, config.ffn)))
        self.down = nnx.Param(_normal(config.ffn * 2 * config.layers)(rngs.params(), (config.ffn, config.width)))

    def __call__(self, x_BTD):
        gate, up, down = (p[...].astype(x_BTD.dtype) for p in (self.gate, self.up, self.down))
        return (jax.nn.silu(x_BTD @ gate) * (x_BTD @ up)) @ down


class Block(nnx.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = SwiGLU(config, rngs)

    def __call__(self, x_BTD, positions_BT, ranges, before=()):
        x_BTD = checkpoint_name(x_BTD, "layer")
        out_BTD, own = self.attention(self.attention_norm(x_BTD), positions_BT, ranges, before)
        x_BTD = x_BTD + out_BTD
        return x_BTD + self.ffn(self.ffn_norm(x_BTD)), own

    def extend(self, x_BOD, positions_BO, slots_BO, ranges, cache):
        out, cache = self.attention.extend(self.attention_norm(x_BOD), positions_BO, slots_BO, ranges, cache)
        x_BOD = x_BOD + out
        return x_BOD + self.ffn(self.ffn_norm(x_BOD)), cache


class Embed(nnx.Module):
    """Token embedding [V, D]."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embedding = nnx.Param(_normal(config.width)(rngs.params(), (config.vocab, config.width)))


class Dense(nnx.Module):
    """A kernel and an optional bias; the value head starts at 0."""

    def __init__(self, kernel, bias=None):
        self.kernel = nnx.Param(kernel)
        if bias is not None:
            self.bias = nnx.Param(bias)


class Decoder(nnx.Module):
    """The whole stack; returns normalised final hidden states, float32."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied:
            self.unembed = Dense(_normal(config.width)(rngs.params(), (config.width, config.vocab)))
        if config.value_head:
            self.value_head = Dense(jnp.zeros((config.width, 1)), jnp.zeros(1))

    def _embed(self, tokens):
        return self.embed.embedding[...].astype(self.config.dtype)[tokens]

    def ranges_of(self, rows: Rows) -> list[attention_op.Ranges]:
        """The ranges of each layer."""
        near = rows.ranges.window(rows.positions_BT, self.config.window) if self.config.window else rows.ranges
        return [near if self.config.windowed(layer) else rows.ranges for layer in range(self.config.layers)]

    def __call__(self, trunk: Rows, remat: Remat):
        x_BTD, call = self._embed(trunk.tokens_BT), remat.wrap(Block.__call__)
        for block, ranges in zip(self.layers, self.ranges_of(trunk), strict=True):
            x_BTD, _ = call(block, x_BTD, trunk.positions_BT, ranges)
        return self.norm(x_BTD).astype(jnp.float32)

    def branched(self, trunk: Rows, branch: Rows, still: "Decoder", remat: Remat):
        """Reads the trunk, and the branches with `still`, the same stack whose parameters have no gradient."""
        x_BTD, call = self._embed(trunk.tokens_BT), remat.wrap(Block.__call__)
        y_BQD = still._embed(branch.tokens_BT)
        layers = zip(self.layers, still.layers, self.ranges_of(trunk), self.ranges_of(branch), strict=True)
        for block, still_block, trunk_ranges, branch_ranges in layers:
            x_BTD, own = call(block, x_BTD, trunk.positions_BT, trunk_ranges)
            y_BQD, _ = still_block(y_BQD, branch.positions_BT, branch_ranges, jax.lax.stop_gradient(own))
        return self.norm(x_BTD).astype(jnp.float32), still.norm(y_BQD).astype(jnp.float32)

    def extend(self, tokens_BO, cached_B, chunk_length_B, cache):
        O, S = tokens_BO.shape[1], cache[0][0].shape[2]
        offset_O = jnp.arange(O)
        slots_BO = cached_B[:, None] + offset_O
        used_BO = offset_O < chunk_length_B[:, None]
        zero_BO = jnp.zeros_like(slots_BO)
        end_BO = jnp.where(used_BO, slots_BO + 1, 0)
        ranges = attention_op.Ranges(zero_BO, zero_BO, zero_BO, end_BO)
        each = self.ranges_of(Rows(tokens_BO, slots_BO, ranges))
        write_BO = jnp.where(used_BO, slots_BO, S)
        x_BOD, new = self._embed(tokens_BO), []
        for block, ranges, layer_cache in zip(self.layers, each, cache, strict=True):
            x_BOD, layer_cache = block.extend(x_BOD, slots_BO, write_BO, ranges, layer_cache)
            new.append(layer_cache)
        return self.norm(x_BOD).astype(jnp.float32), new


@functools.lru_cache(maxsize=16)
def _graphdef(config: Config):
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]


def _merge(config: Config, params: Params) -> Decoder:
    return nnx.merge(_graphdef(config), nnx.State(params))


def init(config: Config, key: jax.Array) -> Params:
    """Makes fresh float32 parameters: a nested dict of arrays. The key is consumed."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=key)), nnx.Param))


def hidden_states(params: Params, config: Config, trunk: Rows, *, remat: Remat = KEEP_ALL) -> jax.Array:
    """Reads whole rows: final hidden states [B, T, D], float32; position t predicts token t + 1."""
    chex.assert_equal_shape([trunk.tokens_BT, trunk.positions_BT, trunk.ranges.hi2])
    return _merge(config, params)(trunk, remat)


def branched_states(
    params: Params, config: Config, trunk: Rows, branch: Rows, *, remat: Remat = KEEP_ALL
) -> tuple[jax.Array, jax.Array]:
    """Reads rows and the branches that fork off them, in one forward: hidden states [B, T, D] and [B, Q, D], float32.

    The ranges of the branches are in indices of the row's keys, then the branches' own (T + Q). Each layer carries two
    streams: a branch reads with stop_gradient(params) and attends to stop_gradient(keys and values of the trunk), so a
    gradient costs what it costs for the trunk alone (in one concatenated row zero cotangents would be propagated too).
    """
    chex.assert_equal_shape([trunk.tokens_BT, trunk.positions_BT, trunk.ranges.hi2])
    chex.assert_equal_shape([branch.tokens_BT, branch.positions_BT, branch.ranges.hi2])
    still = _merge(config, jax.lax.stop_gradient(params))
    return _merge(config, params).branched(trunk, branch, still, remat)


def new_cache(config: Config, rows: int, capacity: int) -> Cache:
    """Makes an empty KV cache for `rows` streams of at most `capacity` tokens."""
    shape = (rows, config.kv_heads, capacity, config.head_size)
    return [(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.layers)]


def extend(
    params: Params,
    config: Config,
    tokens_BO: jax.Array,
    cached_B: jax.Array,
    chunk_length_B: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Appends up to O tokens per row to the cache and returns their final hidden states [B, O, D] and the new cache.

    cached_B: tokens already in the cache. chunk_length_B: tokens of the chunk in use, 0 = the row is left as it is.
    """
    return _merge(config, params).extend(tokens_BO, cached_B, chunk_length_B, cache)


def unembedding(params: Params) -> jax.Array:
    """Returns the unembedding as [D, V] (the transposed embedding when tied)."""
    return params["unembed"]["kernel"] if "unembed" in params else params["embed"]["embedding"].T


def values(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Reads the critic: one value per position [B, T], float32."""
    return (hidden_BTD @ params["value_head"]["kernel"] + params["value_head"]["bias"])[..., 0]
