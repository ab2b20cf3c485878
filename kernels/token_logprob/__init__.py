"""Log-prob of the target token and entropy from hidden states, without holding [T, V]."""

from rsi_jax.kernels.token_logprob.api import logits_of, token_logprob

__all__ = ["logits_of", "token_logprob"]
