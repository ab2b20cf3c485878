"""Log-prob of the target token, entropy and normaliser from hidden states, without holding [N, V]."""

from rsi_jax.kernels.token_logprob.api import Scores, token_logprob
from rsi_jax.kernels.vocabulary import logits_of

__all__ = ["Scores", "logits_of", "token_logprob"]
