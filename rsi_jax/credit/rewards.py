"""What the rewards of a batch can teach, before and after credit: counted rows, signal, shaping, the report."""

import chex
import jax
import jax.numpy as jnp

from rsi_jax import base, masked, returns
from rsi_jax.credit import turns


def check(rollout: base.Rollout, *columns: str) -> None:
    """Checks, at trace time, the shapes that credit reads and that the named columns exist.

    Raises: ValueError naming missing columns; AssertionError for a wrong shape or type.
    """
    base.require(rollout, *columns)
    chex.assert_rank(rollout.tokens_BT, 2)
    B = rollout.tokens_BT.shape[0]
    chex.assert_shape([rollout.group_B, rollout.weight_B], (B,))
    chex.assert_type(rollout.group_B, int)
    chex.assert_rank(jax.tree.leaves(rollout.segments), 2)
    chex.assert_equal_shape(jax.tree.leaves(rollout.segments))
    chex.assert_axis_dimension(rollout.segments.start_BS, 0, B)
    if rollout.value_BT is not None:
        chex.assert_equal_shape([rollout.value_BT, rollout.tokens_BT])


def counted_B(rollout: base.Rollout) -> jax.Array:
    """True for the rollouts that credit reads: weight > 0 and a finite return.

    The others get advantage 0 and enter no baseline (a failed sibling must not shift it; one NaN must not poison it).
    """
    return masked.counted(rollout.return_B, rollout.weight_B)


def counted_BT(rollout: base.Rollout) -> jax.Array:
    """True on the sampled tokens of the rollouts that credit reads."""
    return rollout.mask_BT & counted_B(rollout)[:, None]


def counted_turns(rollout: base.Rollout) -> turns.Turns:
    """The turns of every rollout, columns [B, S]; one that does not count earns nothing."""
    table = jax.vmap(turns.table)(rollout.segments)
    return table._replace(reward_S=jnp.where(counted_B(rollout)[:, None], table.reward_S, 0.0))


def returns_to_go(table: turns.Turns, discount: float = 1.0) -> jax.Array:
    """G_k = r_k + γ d_k G_{k+1} of each turn of a table of columns [B, S]; d_k: the environment's discounts."""
    return jax.vmap(returns.discounted_returns)(table.reward_S, discount * table.discount_S, table.used_S)


def dynamic_sampling_keep(rollout: base.Rollout, *, spread: float = masked.SPREAD) -> jax.Array:
    """Tells which rollouts belong to a group that can teach: max - min of its returns > spread.

    False for groups that agree (all right, all wrong), for singletons and for rows that are not counted. Use it to
    draw again (DAPO; bound the rounds, since every group may agree), or as `signal_B` of losses.aggregate_weights.

    Args:
      rollout: rewards, groups and weights are read.
      spread: in units of the return, >= 0; a range and not a std or an equality, so rounding cannot fake a signal.

    Returns: bool [B].

    Source: Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476), eq. 11.
    Differs: any rewards, not only right and wrong.
    """
    check(rollout)
    return_B, group_B, weight_B = rollout.return_B, rollout.group_B, rollout.weight_B
    return counted_B(rollout) & (masked.group_spread(return_B, group_B, weight_B) > spread)


def overlong_shaping(rollout: base.Rollout, *, max_length: int, buffer: int, penalty: float = 1.0) -> base.Rollout:
    """Takes up to `penalty` from the last action of a rollout that comes near its token limit.

      0                                          n <= max_length - buffer
      -penalty (n - (max_length - buffer)) / buffer   in between
      -penalty                                   n >= max_length

    Args:
      rollout: n = its sampled tokens, over all turns (observations are not the policy's doing).
      max_length: tokens at which the whole penalty is due, > 0.
      buffer: tokens before it over which the penalty grows, in [1, max_length].
      penalty: in units of the return, >= 0.

    Returns: the rollout with the reward of its last action changed; without an action, unchanged.

    Raises: base.InputError for a buffer out of range.

    Source: Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476), eq. 13.
    """
    check(rollout)
    if not 1 <= buffer <= max_length:
        raise base.InputError(f"overlong buffer must be in [1, max_length] tokens, got {buffer} of {max_length}")
    n_B = masked.count(rollout.mask_BT, axis=1)
    due_B = penalty * jnp.clip((n_B - (max_length - buffer)) / buffer, 0.0, 1.0)
    segments = rollout.segments
    action_BS = (segments.kind_BS == base.ACTION) & (segments.length_BS > 0)
    last_BS = action_BS & (rollout.turn_BS == jnp.max(rollout.turn_BS, axis=1, keepdims=True))
    reward_BS = segments.reward_BS - jnp.where(last_BS, due_B[:, None], 0.0)
    return rollout.replace(segments=segments.replace(reward_BS=reward_BS))


def to_tokens(rollout: base.Rollout, adv_B: jax.Array) -> jax.Array:
    """Gives every sampled token of a counted rollout the advantage of its rollout; 0 elsewhere; no gradient."""
    return jax.lax.stop_gradient(jnp.where(counted_BT(rollout), adv_B[:, None], 0.0).astype(jnp.float32))


def running_baseline(baseline: jax.Array, rollout: base.Rollout, *, decay: float = 0.95) -> jax.Array:
    """Advances the running mean of returns by a batch: decay b + (1 - decay) mean R; b where no rollout counts.

    Args:
      baseline: b, a scalar or one per rollout.
      decay: in [0, 1).

    Raises: base.InputError for a decay out of range.
    """
    if not 0 <= decay < 1:
        raise base.InputError(f"credit.rae.decay must be in [0, 1), got {decay}")
    kept_B = counted_B(rollout)
    moved = decay * baseline + (1.0 - decay) * masked.mean(rollout.return_B, kept_B)
    return jnp.where(jnp.any(kept_B), moved, baseline)


def outcome_classes(x: jax.Array, edges: tuple[float, ...]) -> jax.Array:
    """Class of each outcome, in [0, len(edges)]: how many of the ascending edges it reaches."""
    return jnp.searchsorted(jnp.asarray(edges, jnp.float32), x, side="right")


def return_classes(table: turns.Turns, edges: tuple[float, ...]) -> jax.Array:
    """One-hot class of the return still to come at each turn [B, S, M]."""
    return jax.nn.one_hot(outcome_classes(returns_to_go(table), edges), len(edges) + 1)


def reward_classes(table: turns.Turns, edges: tuple[float, ...]) -> jax.Array:
    """One-hot class of each turn's own reward [B, S, M]; 0 beyond the turns."""
    onehot_BSM = jax.nn.one_hot(outcome_classes(table.reward_S, edges), len(edges) + 1)
    return masked.zero(onehot_BSM, jnp.broadcast_to(table.used_S[..., None], onehot_BSM.shape))


def ahead(table: turns.Turns, x_BSM: jax.Array) -> jax.Array:
    """Sums what each turn and those after it have, for every class."""
    return jax.vmap(lambda x_BS: returns_to_go(table._replace(reward_S=x_BS)), 2, 2)(x_BSM)


def hindsight_weights(rollout: base.Rollout, edges: tuple[float, ...], of: str) -> jax.Array:
    """How often outcome class m came after each sampled token [B, T, M]: what a hindsight model learns from.

    of: 'returns' (hca: 1 for the class of the return to come) | 'rewards' (cocoa: how many turns ahead paid it).
    """
    table = counted_turns(rollout)
    count_BSM = return_classes(table, edges) if of == "returns" else ahead(table, reward_classes(table, edges))
    count_BTM = jax.vmap(turns.to_tokens)(count_BSM, rollout.turn_BT)
    return masked.zero(count_BTM, jnp.broadcast_to(counted_BT(rollout)[..., None], count_BTM.shape))


def turns_to_tokens(rollout: base.Rollout, adv_BS: jax.Array) -> jax.Array:
    """Gives every sampled token of a counted rollout the advantage of its turn; 0 elsewhere; no gradient."""
    adv_BT = jax.vmap(turns.to_tokens)(adv_BS, rollout.turn_BT)
    return jax.lax.stop_gradient(masked.zero(adv_BT, counted_BT(rollout)).astype(jnp.float32))


def relative(x_N: jax.Array, group_N: jax.Array, weight_N: jax.Array, *, scale: str, floor: float) -> jax.Array:
    """Compares entries within their group: x - mean, by `scale` 'std' divided by std + floor.

    Entries of weight 0 or not finite are in no group and get 0, as does a group that agrees to 1e-6 or has one entry.
    """
    places = (x_N, group_N, weight_N)
    centred_N = x_N - masked.group_mean(*places)
    if scale == "std":
        centred_N = centred_N / (masked.group_std(*places) + floor)
    return masked.zero(centred_N, masked.counted(x_N, weight_N) & (masked.group_spread(*places) > masked.SPREAD))


def check_scale(name: str, scale: str, floor: float) -> None:
    """Raises: base.InputError unless scale is 'std' or 'none' and floor > 0."""
    if scale not in ("std", "none"):
        raise base.InputError(f"credit.{name}.scale is 'std' or 'none', got '{scale}'")
    if not floor > 0:
        raise base.InputError(f"credit.{name}.std_floor must be > 0, got {floor}")


def frac_zero_adv(rollout: base.Rollout, adv_BT: jax.Array) -> jax.Array:
    """Share of the trained tokens with advantage 0; a variant that changes another's advantages says it again."""
    return masked.mean(adv_BT == 0, rollout.mask_BT & (rollout.weight_B > 0)[:, None])


def report(rollout: base.Rollout, adv_BT: jax.Array, *, std_floor: float = 0.0) -> dict[str, jax.Array]:
    """Counts what taught nothing; every credit function logs these.

    Args:
      rollout, adv_BT: the advantages made from the rollout.
      std_floor: what the variant adds to the std of a group's returns before it divides by it; 0 = it does not divide.

    Returns:
      frac_zero_adv         share of the trained tokens with advantage 0 (1 = this step learns nothing: warn)
      groups                groups with a counted rollout
      zero_variance_groups  of these, with two rollouts or more whose returns agree to 1e-6
      singleton_groups      of these, with one rollout only: group baselines give it 0
      std_floor_groups      of these, with returns that differ and a std at or below std_floor: the floor scales them
      nonfinite_rewards     trained rollouts whose return is NaN or infinite: excluded
      masked_rows           share of the rollouts with weight 0: in no loss and no baseline
    """
    trained_B, counts_B = rollout.weight_B > 0, counted_B(rollout)
    size_B = masked.group_size(rollout.return_B, rollout.group_B, rollout.weight_B)
    agree_B = masked.group_spread(rollout.return_B, rollout.group_B, rollout.weight_B) <= masked.SPREAD
    std_B = masked.group_std(rollout.return_B, rollout.group_B, rollout.weight_B)
    return {
        "frac_zero_adv": frac_zero_adv(rollout, adv_BT),
        "groups": masked.count_groups(counts_B, rollout.group_B),
        "zero_variance_groups": masked.count_groups(counts_B & agree_B & (size_B > 1), rollout.group_B),
        "singleton_groups": masked.count_groups(counts_B & (size_B == 1), rollout.group_B),
        "std_floor_groups": masked.count_groups(counts_B & ~agree_B & (std_B <= std_floor), rollout.group_B),
        "nonfinite_rewards": masked.count(trained_B & ~counts_B),
        "masked_rows": jnp.mean(~trained_B),
    }
