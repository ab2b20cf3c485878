"""Rollouts for tests: those that the laws of credit are held to."""

from rsi_jax.credit.examples import *  # noqa: F403
