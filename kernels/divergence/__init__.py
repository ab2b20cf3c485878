"""Divergence between the student's and the teacher's next-token distributions, from hidden states."""

from rsi_jax.kernels.divergence.api import divergence, from_logits

__all__ = ["divergence", "from_logits"]
