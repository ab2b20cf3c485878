"""Attention by the two-key-range rule: causal, packed, windowed and branched masks as four int vectors."""

from rsi_jax.kernels.attention.api import (
    IMPLEMENTATIONS,
    Ranges,
    attention,
    causal_ranges,
    decode_attention,
    misfit,
    resolve,
)

__all__ = ["IMPLEMENTATIONS", "Ranges", "attention", "causal_ranges", "decode_attention", "misfit", "resolve"]
