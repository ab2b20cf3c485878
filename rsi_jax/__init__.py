"""rsi_jax: long-horizon credit assignment in language-model RL, in JAX. Importing it touches no device."""

__version__ = "0.1.0"
