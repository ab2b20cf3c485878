"""Plays a policy in a world, many episodes at once, and lays the episodes out as a base.Rollout.

A turn is one sampled token, whose id is the action; the prompt is one token, and so is, where asked for, what the
environment shows between turns. `Path` keeps the states, so that the truth of every token can be looked up.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base
from rsi_jax.envs.exact import world as worlds
from rsi_jax.envs.exact.world import World


class Path(NamedTuple):
    """What happened, columns [B, H] over turns; beyond the end of an episode played_BH is False.

    state_BH   state before the turn.
    action_BH, branch_BH   what was done, and which branch followed.
    reward_BH  reward of the turn; 0 beyond the end.
    logp_BH    log-prob of the action, nats; 0 beyond the end.
    played_BH  True for the turns of the episode.
    final_B    state in which it ended.
    """

    state_BH: jax.Array
    action_BH: jax.Array
    branch_BH: jax.Array
    reward_BH: jax.Array
    logp_BH: jax.Array
    played_BH: jax.Array
    final_B: jax.Array


class Tables(NamedTuple):
    """A world and a policy as the sampler reads them: cumulative probabilities, so that one uniform is one choice."""

    logp_HNA: jax.Array
    action_HNA: jax.Array
    branch_HNAJ: jax.Array
    next_HNAJ: jax.Array
    reward_HNAJ: jax.Array
    over_N: jax.Array


class Sample(NamedTuple):
    """A batch of rollouts, and the paths they are made of."""

    rollout: base.Rollout
    path: Path


def tables(world: World, logits: np.ndarray) -> Tables:
    """Prepares a policy of a world for `play`: float32 on the device."""

    def cumulative(p):
        total = np.cumsum(p, -1)
        return jnp.asarray(total / total[..., -1:], jnp.float32)

    pi_HNA = worlds.policy(world, logits)
    return Tables(
        logp_HNA=jnp.asarray(np.log(pi_HNA), jnp.float32),
        action_HNA=cumulative(pi_HNA),
        branch_HNAJ=cumulative(world.prob_HNAJ),
        next_HNAJ=jnp.asarray(world.next_HNAJ, jnp.int32),
        reward_HNAJ=jnp.asarray(world.reward_HNAJ, jnp.float32),
        over_N=jnp.asarray(world.terminal_N),
    )


def _choose(cumulative_BK: jax.Array, key: jax.Array) -> jax.Array:
    u_B = jax.random.uniform(key, cumulative_BK.shape[:1])
    return jnp.sum(cumulative_BK <= u_B[:, None], axis=1, dtype=jnp.int32)  # the last entry is 1 > u


def _act(at: Tables, state_B: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples (action, branch) in each state, from the rows of one turn."""
    key_action, key_branch = jax.random.split(key)
    action_B = _choose(at.action_HNA[state_B], key_action)
    return action_B, _choose(at.branch_HNAJ[state_B, action_B], key_branch)


def _turns(made: Tables) -> Tables:
    """The tables to scan over: what does not depend on the turn is left out."""
    return made._replace(over_N=None)


@jax.jit
def play(made: Tables, start_B: jax.Array, key: jax.Array, trunk: Path | None = None, fork_B=None) -> Path:
    """Plays one episode per start state; with a trunk, its turns before `fork_B` are taken over as they were.

    Args:
      made: of `tables`.
      start_B: first state of each row.
      key: the key is consumed.
      trunk: row b of it is what row b shares; None = nothing is shared.
      fork_B: first turn that is played anew, in [0, H]; the turns before it must have been played in the trunk.
    """
    H = made.logp_HNA.shape[0]
    given = None if trunk is None else (trunk.action_BH.T, trunk.branch_BH.T)

    def turn(carry, xs):
        state_B, on_B = carry
        at, key, h, shared = xs
        action_B, branch_B = _act(at, state_B, key)
        if shared is not None:
            action_B = jnp.where(h < fork_B, shared[0], action_B)
            branch_B = jnp.where(h < fork_B, shared[1], branch_B)
        place = (state_B, action_B, branch_B)
        reward_B = jnp.where(on_B, at.reward_HNAJ[place], 0.0)
        logp_B = jnp.where(on_B, at.logp_HNA[state_B, action_B], 0.0)
        after_B = jnp.where(on_B, at.next_HNAJ[place], state_B)
        return (after_B, on_B & ~made.over_N[after_B]), (state_B, action_B, branch_B, reward_B, logp_B, on_B)

    keys = jax.random.split(key, H)
    xs = (_turns(made), keys, jnp.arange(H), given)
    (final_B, _), columns = jax.lax.scan(turn, (start_B, ~made.over_N[start_B]), xs)
    return Path(*(column_HB.T for column_HB in columns), final_B=final_B)


@jax.jit
def continuations(made: Tables, path: Path, key: jax.Array, count) -> tuple[jax.Array, jax.Array]:
    """Plays `count` fresh episodes from the state before every turn of every path.

    Args:
      made: of `tables`.
      path: where to start from; turns beyond the end of an episode are not asked.
      key: the key is consumed.
      count: K >= 1; it may be traced.

    Returns: (mean return of the K [B, H], 0 where not asked; tokens that were sampled, a scalar).
    """
    H = path.state_BH.shape[1]
    begin_BH = jnp.broadcast_to(jnp.arange(H), path.state_BH.shape)
    first_N, asked_N = path.state_BH.reshape(-1), path.played_BH.reshape(-1)

    def turn(carry, xs):
        state_N, on_N, total_N, tokens = carry
        at, key, h = xs
        acts_N = on_N & (begin_BH.reshape(-1) <= h)
        action_N, branch_N = _act(at, state_N, key)
        place = (state_N, action_N, branch_N)
        total_N = total_N + jnp.where(acts_N, at.reward_HNAJ[place], 0.0)
        after_N = jnp.where(acts_N, at.next_HNAJ[place], state_N)
        return (after_N, on_N & ~made.over_N[after_N], total_N, tokens + jnp.sum(acts_N)), None

    def once(k, carry):
        total_N, tokens = carry
        xs = (_turns(made), jax.random.split(jax.random.fold_in(key, k), H), jnp.arange(H))
        (_, _, total_N, tokens), _ = jax.lax.scan(turn, (first_N, asked_N, total_N, tokens), xs)
        return total_N, tokens

    total_N, tokens = jax.lax.fori_loop(0, count, once, (jnp.zeros(first_N.shape), 0))
    return total_N.reshape(path.state_BH.shape) / count, tokens


@functools.partial(jax.jit, static_argnames="fill")
def on_tokens(rollout: base.Rollout, path: Path, x_BH, fill: float = 0.0) -> jax.Array:
    """Spreads a column over turns, [B, H] or [B, H, M], onto the tokens: `fill` off-mask."""
    x_BH = jnp.where(_wide(path.played_BH, jnp.ndim(x_BH)), jnp.asarray(x_BH, jnp.float32), fill)
    H, T = path.state_BH.shape[1], rollout.tokens_BT.shape[1]
    stride = T // H  # 1 + H tokens, or 2 H with observations
    out = jnp.full((x_BH.shape[0], T, *x_BH.shape[2:]), fill, jnp.float32)
    return out.at[:, 1 : 2 + stride * (H - 1) : stride].set(x_BH)


def _wide(mask_BH: jax.Array, rank: int) -> jax.Array:
    return mask_BH.reshape(mask_BH.shape + (1,) * (rank - 2))


@functools.partial(jax.jit, static_argnames=("actions", "observed"))
def to_rollout(path: Path, group_B, *, actions: int, observed: bool = False, tree_B=None) -> base.Rollout:
    """Lays paths out as rollouts: the prompt (token = first state), then actions, observations between them if asked.

    Args:
      path: rows B.
      group_B: int [B], in [0, B).
      actions: A; states are shown as the tokens A + state.
      observed: one observation token after every turn but the last of the capacity.
      tree_B: as in base.Rollout.

    Anchors are state numbers. The environment ends every episode (finish ENV), also at the horizon.
    """
    B, H = path.state_BH.shape
    played_BH = path.played_BH
    more_BH = jnp.pad(played_BH, ((0, 0), (0, 1)))[:, 1:]  # a turn follows
    shown_BH = actions + path.state_BH
    kinds, stride = ((base.ACTION, base.OBSERVATION), 2) if observed else ((base.ACTION,), 1)
    S = 1 + stride * H - (stride - 1)

    def column(first, action_BH, between_BH, dtype=jnp.int32):
        parts = [action_BH, between_BH][:stride]
        turns_BS = jnp.stack([jnp.broadcast_to(x, (B, H)) for x in parts], axis=2).reshape(B, stride * H)
        prompt_B1 = jnp.broadcast_to(first, (B,))[:, None]
        return jnp.concatenate([prompt_B1, turns_BS], axis=1)[:, :S].astype(dtype)

    segments = base.Segments(
        start_BS=jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S)),
        length_BS=column(1, played_BH, more_BH),
        kind_BS=column(base.PROMPT, *kinds, *((0,) if stride == 1 else ())),
        reward_BS=column(0.0, path.reward_BH, 0.0, jnp.float32),
        discount_BS=column(1.0, jnp.where(played_BH & ~more_BH, 0.0, 1.0), 1.0, jnp.float32),
        finish_BS=column(
            base.NOT_SAMPLED,
            jnp.where(more_BH, base.STOP, jnp.where(played_BH, base.ENV, base.NOT_SAMPLED)),
            base.NOT_SAMPLED,
        ),
        anchor_BS=column(base.NO_ANCHOR, jnp.where(played_BH, path.state_BH, base.NO_ANCHOR), base.NO_ANCHOR),
        parent_BS=jnp.full((B, S), base.NO_PARENT, jnp.int32),
    )
    next_BH = jnp.roll(shown_BH, -1, axis=1)  # what is shown after turn h is the state before turn h + 1
    return base.Rollout(
        tokens_BT=column(shown_BH[:, 0], path.action_BH, next_BH),
        logp_BT=column(0.0, path.logp_BH, 0.0, jnp.float32),
        kept_mass_BT=jnp.ones((B, S)),
        group_B=jnp.asarray(group_B, jnp.int32),
        segments=segments,
        weight_B=jnp.ones(B),
        chain_B=jnp.arange(B, dtype=jnp.int32),
        tree_B=None if tree_B is None else jnp.asarray(tree_B, jnp.int32),
    )


def sample(
    world: World,
    logits: np.ndarray,
    key: jax.Array,
    *,
    groups: int,
    size: int = 8,
    observed: bool = False,
    forked: bool = False,
) -> Sample:
    """Samples groups of rollouts; those of one group begin in one state.

    Args:
      world, logits: the policy, [N, A] or [H, N, A].
      key: the key is consumed.
      groups, size: B = groups · size rows, group by group; each >= 1.
      observed: show the state between turns, as a token.
      forked: the second half of a group forks: row size/2 + i takes over row i up to a turn drawn evenly from those it
        played after its first, log-probs included, and is played anew from there (from the start if there is only
        one). tree_B names the row that a tree grew from.

    Raises: base.InputError for sizes below 1, or an odd size when forked.
    """
    worlds.at_least("sample: groups", groups, 1)
    worlds.at_least("sample: size", size, 1)
    if forked and size % 2:
        raise base.InputError(f"forked groups need an even size, got {size}")
    first_N = jnp.asarray(np.cumsum(world.start_N) / world.start_N.sum(), jnp.float32)
    return _sample(tables(world, logits), first_N, key, groups, size, observed, forked)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _sample(
    made: Tables, first_N: jax.Array, key: jax.Array, groups: int, size: int, observed: bool, forked: bool
) -> Sample:
    B, A = groups * size, made.logp_HNA.shape[2]
    key_start, key_play, key_fork, key_again = jax.random.split(key, 4)
    start_B = jnp.repeat(_choose(jnp.broadcast_to(first_N, (groups, len(first_N))), key_start), size)
    path, tree_B = play(made, start_B, key_play), None
    if forked:
        row_B = jnp.arange(B)
        grown_B = row_B % size >= size // 2
        tree_B = jnp.where(grown_B, row_B - size // 2, row_B)
        trunk = Path(*(x[tree_B] for x in path))
        turns_B = jnp.sum(trunk.played_BH, axis=1)
        drawn_B = 1 + jnp.floor(jax.random.uniform(key_fork, (B,)) * (turns_B - 1)).astype(jnp.int32)
        fork_B = jnp.where(grown_B, jnp.where(turns_B > 1, drawn_B, 0), trunk.played_BH.shape[1])
        path = play(made, start_B, key_again, trunk, fork_B)
    return Sample(to_rollout(path, jnp.arange(B) // size, actions=A, observed=observed, tree_B=tree_B), path)
