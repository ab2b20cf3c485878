"""Credit from states that recur: turns that begin in the same environment state are compared with each other.

A state is known by `segments.anchor_BS`, the environment's hash of it before the action. What followed from one state
differs by what was done there (and by luck), not by how hard the state is: a baseline per state costs no critic.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.credit import rewards

NEEDS: dict[str, tuple[str, ...]] = {}


def gigpo(
    rollout: base.Rollout,
    *,
    inner: base.CreditFn,
    omega: float = 1.0,
    discount: float = 0.95,
    scale: str = "none",
    std_floor: float = 1e-6,
) -> base.Credit:
    """Group-in-group: A_k = A_inner + ω A_step, with A_step the return-to-go among turns from the same state.

      G_k = r_k + γ d_k G_{k+1},   A_step = (G_k - mean G) / (std G + std_floor), over turns of equal (group, anchor)

    With ω = 0, without anchors, or where no state recurs: `inner`. A state met once, one without an anchor, and one
    whose G agree to 1e-6 give A_step = 0. Turns of one rollout that meet a state again are compared too.

    Args:
      rollout: rewards, discounts, groups, weights and anchors are read.
      inner: credit function of the whole rollout; grpo in the paper.
      omega: >= 0.
      discount: γ per turn, in [0, 1].
      scale: 'none' | 'std'.
      std_floor: in units of the return, > 0.

    Raises: base.InputError for an unknown scale or a knob out of range.

    Source: Feng et al. 2025 (https://arxiv.org/abs/2505.10978), eq. 6-9; 'none' as in the authors' ALFWorld runs.
    Differs: the episode term is `inner`: grpo with per='turn' is the authors' code, whose mean is over turns.
      Similar states are made equal before credit (rollout.anchor_similarity).
    """
    rewards.check(rollout)
    rewards.check_scale("gigpo", scale, std_floor)
    if not (omega >= 0 and 0 <= discount <= 1):
        raise base.InputError(f"credit.gigpo: omega >= 0 and discount in [0, 1], got {omega} and {discount}")
    credit = inner(rollout)
    table = rewards.counted_turns(rollout)
    togo_N = rewards.returns_to_go(table, discount).reshape(-1)
    known_N = (table.used_S & rewards.counted_B(rollout)[:, None] & (table.anchor_S != base.NO_ANCHOR)).reshape(-1)
    group_BS = jnp.broadcast_to(rollout.group_B[:, None], table.anchor_S.shape)
    state_N = _ids(group_BS.reshape(-1), table.anchor_S.reshape(-1))
    places = (state_N, known_N.astype(jnp.float32))
    signal_N = known_N & (masked.group_spread(togo_N, *places) > masked.SPREAD)
    step_BS = rewards.relative(togo_N, *places, scale=scale, floor=std_floor).reshape(table.used_S.shape)
    adv_BT = credit.adv_BT + rewards.turns_to_tokens(rollout, omega * step_BS)
    met = masked.count(known_N)
    again = masked.count(known_N & (masked.group_size(togo_N, *places) > 1))
    shares = {"recurring": again / jnp.maximum(met, 1.0), "step_signal": masked.count(signal_N) / jnp.maximum(met, 1.0)}
    metrics = {**credit.metrics, "frac_zero_adv": rewards.frac_zero_adv(rollout, adv_BT), **shares}
    return credit.replace(adv_BT=adv_BT, metrics=metrics)


def _ids(group_N: jax.Array, anchor_N: jax.Array) -> jax.Array:
    """Numbers equal (group, anchor) pairs alike, in [0, N)."""
    order_N = jnp.lexsort((anchor_N, group_N))
    group_N, anchor_N = group_N[order_N], anchor_N[order_N]
    new_N = (group_N != jnp.roll(group_N, 1)) | (anchor_N != jnp.roll(anchor_N, 1))
    return jnp.zeros_like(order_N).at[order_N].set(jnp.cumsum(new_N.at[0].set(False)))
