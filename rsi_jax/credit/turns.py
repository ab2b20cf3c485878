"""The turns of ONE rollout as a table; vmap outside."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rsi_jax import base


class Turns(NamedTuple):
    """Column k is turn k: an action and what follows it up to the next. Capacity S, the number of segments.

    used_S       bool     k < number of turns.
    first_S      int32    first token of the action.
    last_S       int32    last token of the action, where the turn's reward lands.
    reward_S     float32  rewards of the action and of what follows it.
    anchor_S     int32    anchor of the state before the action; NO_ANCHOR where there is none.
    discount_S   float32  product of their discounts; after the last turn 0, unless the rollout was truncated there.
    """

    used_S: jax.Array
    first_S: jax.Array
    last_S: jax.Array
    reward_S: jax.Array
    discount_S: jax.Array
    anchor_S: jax.Array


def table(segments: base.Segments) -> Turns:
    """Gathers the segments of one rollout (columns [S]) into turns.

    The last turn was truncated if the budget of the turn or of the context ended it (finish LENGTH): its discount is
    then what the environment said (0 if it ended the episode all the same), so that a critic may bootstrap. Any other
    end is terminal. Never inferred from token ids or from the width of the batch.

    A reward before the first action is nobody's: no turn has it (return_B does).
    """
    used_S = segments.length_BS > 0
    action_S = used_S & (segments.kind_BS == base.ACTION)
    S = action_S.shape[0]
    turn_S = jnp.cumsum(action_S) - 1
    turns = jnp.sum(action_S)
    member_S = jnp.where(used_S & (turn_S >= 0), turn_S, S)  # S: dropped by the scatters
    acting_S = jnp.where(action_S, turn_S, S)

    def place(index_S, x_S, initial):
        return jnp.full(S, initial, x_S.dtype).at[index_S].set(x_S, mode="drop")

    truncated_S = jnp.zeros(S, bool).at[member_S].max(segments.finish_BS == base.LENGTH, mode="drop")
    discount_S = jnp.ones(S).at[member_S].multiply(segments.discount_BS, mode="drop")
    final_S = jnp.arange(S) == turns - 1
    return Turns(
        used_S=jnp.arange(S) < turns,
        first_S=place(acting_S, segments.start_BS, 0),
        last_S=place(acting_S, segments.start_BS + segments.length_BS - 1, 0),
        reward_S=jnp.zeros(S).at[member_S].add(segments.reward_BS, mode="drop"),
        discount_S=jnp.where(final_S & ~truncated_S, 0.0, discount_S),
        anchor_S=place(acting_S, segments.anchor_BS, base.NO_ANCHOR),
    )


def final(used_S: jax.Array) -> jax.Array:
    """True at the last turn of each rollout; any leading axes."""
    after_S = jnp.concatenate([used_S[..., 1:], jnp.zeros_like(used_S[..., :1])], axis=-1)
    return used_S & ~after_S


def to_tokens(x_S: jax.Array, turn_T: jax.Array) -> jax.Array:
    """Gives each token the value of its turn; that of turn 0 where there is none (mask it)."""
    return x_S[jnp.maximum(turn_T, 0)]
