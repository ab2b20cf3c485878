"""A learned hindsight model: what would the policy say here, had it known the class of what was to come?

For each class m of outcomes the policy's unembedding W gets a low-rank correction, W + A_m C: the logits of the policy,
moved by what the class tells of the state. At the start A = 0, so hindsight is the policy and no action earns credit by
it. It learns by maximum likelihood of what was sampled, given what really came of it; the policy gets no gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp


def init(key: jax.Array, *, classes: int, width: int, vocab: int, rank: int) -> dict[str, jax.Array]:
    """Starts as the policy: A_m = 0 for every class m [M, D, rank], C random [rank, V]."""
    return {
        "state": jnp.zeros((classes, width, rank)),
        "token": jax.random.normal(key, (rank, vocab)) / jnp.sqrt(rank),
    }


def unembeddings(model: Any, unembedding_DV: jax.Array) -> jax.Array:
    """The unembedding of each class [M, D, V]: W + A_m C."""
    return unembedding_DV + model["state"] @ model["token"]
