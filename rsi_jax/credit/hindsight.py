"""Credit from hindsight: how much more likely is an action for one who knows what came of it?

`hcapo` reads the policy itself, told how the rollout ended; `hca` and `cocoa` read a learned model of the action given
the state and the class of an outcome. Where knowing the outcome changes nothing, the action earned nothing.
What `hca` and `cocoa` sum from a turn on has the environment's discounts.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.credit import rewards, turns

NEEDS: dict[str, tuple[str, ...]] = {
    "hcapo": ("hindsight_logp_BT",),
    "hca": ("outcome_logp_BTM",),
    "cocoa": ("outcome_logp_BTM",),
}
LOG_RATIO_MAX = 20.0
EDGES = (-1e-6, 1e-6, 0.5)


def hcapo(
    rollout: base.Rollout,
    *,
    inner: base.CreditFn,
    omega: float = 1.0,
    discount: float = 0.95,
    temperature: float = 5.0,
    clip_low: float = 0.8,
    clip_high: float = 1.2,
    denominator: str = "trajectory",
    smooth: bool = False,
    success_return: float = 0.5,
    std_floor: float = 1e-6,
) -> base.Credit:
    """Hindsight of the policy itself: A_k = A_inner + ω z(Q_k), Q_k = ρ_k γ^(K-k) R.

      π_k = exp(mean over the turn's tokens of log π(y | how it ended) / temperature)
      ρ_k = clip(π_k / mean_j π_j, low, high), or with denominator 'policy' clip(π_k / the same without hindsight, ...)

    K is the last turn, R the return. z normalises over all turns of the group; what it takes from a successful
    rollout is left out. With the published denominator, the mean over the rollout's turns, an empty hint does not give
    ρ = 1: sure actions earn credit whatever hindsight says. With 'policy' it does, exactly. With ω = 0: `inner`; with
    temperature -> inf: ρ = 1 and only γ tells turns apart.

    Args:
      rollout: needs hindsight_logp_BT and what `inner` needs.
      inner: credit function of the whole rollout; grpo in the paper.
      omega: >= 0.
      discount: γ per turn, in [0, 1].
      temperature: > 0; it flattens the ratios.
      clip_low, clip_high: bounds of ρ, 0 <= low <= 1 <= high.
      denominator: 'trajectory' | 'policy'.
      smooth: Q_k = (Q_k + Q_{k+1}) / 2, the last turn as it is.
      success_return: in units of the return: a rollout that reaches it succeeded.
      std_floor: > 0.

    Raises: ValueError without hindsight_logp_BT; base.InputError for a knob out of range.

    Source: HCAPO 2026 (https://arxiv.org/abs/2603.08754).
    """
    rewards.check(rollout, "hindsight_logp_BT")
    rewards.check_scale("hcapo", "std", std_floor)
    if not (omega >= 0 and 0 <= discount <= 1):
        raise base.InputError(f"credit.hcapo: omega >= 0 and discount in [0, 1], got {omega} and {discount}")
    used_BS = rewards.counted_turns(rollout).used_S
    ratio_BS = _hindsight_ratio(rollout, used_BS, temperature, clip_low, clip_high, denominator)
    credit, known_BS = inner(rollout), used_BS & rewards.counted_B(rollout)[:, None]
    ahead_BS = masked.count(used_BS, axis=1)[:, None] - 1.0 - jnp.arange(used_BS.shape[1])
    q_BS = ratio_BS * discount ** jnp.maximum(ahead_BS, 0.0) * rollout.return_B[:, None]
    if smooth:
        next_BS = jnp.pad(q_BS[:, 1:], ((0, 0), (0, 1)))
        q_BS = jnp.where(ahead_BS > 0, 0.5 * (q_BS + next_BS), q_BS)
    group_N = jnp.broadcast_to(rollout.group_B[:, None], q_BS.shape).reshape(-1)
    places = (q_BS.reshape(-1), group_N, known_BS.reshape(-1).astype(jnp.float32))
    z_BS = rewards.relative(*places, scale="std", floor=std_floor).reshape(q_BS.shape)
    z_BS = jnp.where((rollout.return_B >= success_return)[:, None], jnp.maximum(z_BS, 0.0), z_BS)
    adv_BT = credit.adv_BT + rewards.turns_to_tokens(rollout, omega * z_BS)
    metrics = {**credit.metrics, **rewards.report(rollout, adv_BT), "hindsight_ratio": masked.mean(ratio_BS, known_BS)}
    return credit.replace(adv_BT=adv_BT, metrics=metrics)


def _hindsight_ratio(
    rollout: base.Rollout,
    used_BS: jax.Array,
    temperature: float,
    clip_low: float,
    clip_high: float,
    denominator: str,
) -> jax.Array:
    """ρ of `hcapo`, one per turn."""
    if not temperature > 0:
        raise base.InputError(f"credit.hcapo.temperature must be > 0, got {temperature}")
    if denominator not in ("trajectory", "policy") or not 0 <= clip_low <= 1 <= clip_high:
        raise base.InputError(
            "credit.hcapo: denominator is 'trajectory' or 'policy' and 0 <= clip_low <= 1 <= clip_high, got "
            f"'{denominator}', {clip_low}, {clip_high}"
        )

    def per_turn(logp_BT):
        turn_BT = jnp.where(rollout.mask_BT, rollout.turn_BT, -1)
        return masked.segment_mean(logp_BT, turn_BT, segments=used_BS.shape[1]) / temperature

    hindsight_BS = per_turn(base.given(rollout.hindsight_logp_BT, "hindsight_logp_BT"))
    against_BS = per_turn(rollout.logp_BT)
    if denominator == "trajectory":  # the log of the mean over the turns
        total_B1 = jax.nn.logsumexp(hindsight_BS, axis=1, where=used_BS, keepdims=True)
        against_BS = total_B1 - jnp.log(masked.count(used_BS, axis=1)[:, None])
    return jnp.clip(jnp.exp(hindsight_BS - against_BS), clip_low, clip_high)


def hca(rollout: base.Rollout, *, edges: tuple[float, ...] = EDGES, clip: float = 0.0) -> base.Credit:
    """Hindsight credit of returns: A_t = (1 - π(y_t) / h(y_t | class of Z)) Z, Z the return still to come.

    h is what the action would be for one who knows the class that Z falls in. Unbiased where every action can bring
    every class of Z that is not 0; one that never brings a class earns 0 for it, and not less.
    With h = π: 0.

    Args:
      rollout: needs outcome_logp_BTM, M = len(edges) + 1.
      edges: ascending; class m holds edges[m-1] <= Z < edges[m], in units of the return.
      clip: bound of π / h, 0 = none (beyond exp(20)).

    Raises: ValueError without outcome_logp_BTM or for another M; base.InputError for edges that do not ascend.

    Source: Harutyunyan et al. 2019 (https://arxiv.org/abs/1912.02503), eq. 5.
    Differs: time runs over sampled tokens; Z is a class of returns, not its exact value.
    """
    table = _outcome_turns(rollout, edges, clip, "hca")
    togo_BS = rewards.returns_to_go(table)
    return _counterfactual(rollout, togo_BS[..., None] * rewards.return_classes(table, edges), clip)


def cocoa(rollout: base.Rollout, *, edges: tuple[float, ...] = EDGES, clip: float = 0.0) -> base.Credit:
    """Counterfactual contributions: A_t = Σ_j (1 - π(y_t) / h(y_t | class of r_j)) r_j over the turns j from t's on.

    Each reward is credited on its own: one that comes whatever is done (h = π) adds nothing, not even noise. With one
    reward, at the end: hca.

    Args:
      rollout: needs outcome_logp_BTM, M = len(edges) + 1.
      edges: ascending; class m holds edges[m-1] <= r < edges[m], in units of the reward of a turn.
      clip: as in `hca`.

    Raises: as `hca`.

    Source: Meulemans et al. 2023, COCOA (https://arxiv.org/abs/2306.16803), with rewards as outcomes.
    Differs: the contribution of the sampled action; the paper sums over all actions.
    """
    table = _outcome_turns(rollout, edges, clip, "cocoa")
    own_BSM = table.reward_S[..., None] * rewards.reward_classes(table, edges)
    return _counterfactual(rollout, rewards.ahead(table, own_BSM), clip)


def _outcome_turns(rollout: base.Rollout, edges: tuple[float, ...], clip: float, name: str) -> turns.Turns:
    rewards.check(rollout, "outcome_logp_BTM")
    if not edges or list(edges) != sorted(set(edges)) or clip < 0:
        raise base.InputError(f"credit.{name}: edges must ascend and clip be >= 0, got {edges}, {clip}")
    M = base.given(rollout.outcome_logp_BTM, "outcome_logp_BTM").shape[2]
    if M != len(edges) + 1:
        raise ValueError(f"outcome_logp_BTM has {M} classes, credit.{name}.edges make {len(edges) + 1}")
    return rewards.counted_turns(rollout)


def _counterfactual(rollout: base.Rollout, earned_BSM: jax.Array, clip: float) -> base.Credit:
    """Σ_m (1 - π / h_m) earned_m at each token."""
    kept_BT = rewards.counted_BT(rollout)
    outcome_BTM = base.given(rollout.outcome_logp_BTM, "outcome_logp_BTM")
    log_ratio_BTM = rollout.logp_BT[..., None] - outcome_BTM
    ratio_BTM = jnp.exp(jnp.clip(log_ratio_BTM, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    if clip:
        ratio_BTM = jnp.minimum(ratio_BTM, clip)
    earned_BTM = jax.vmap(turns.to_tokens)(earned_BSM, rollout.turn_BT)
    adv_BT = masked.zero(jnp.sum((1.0 - ratio_BTM) * earned_BTM, axis=2), kept_BT)
    adv_BT = jax.lax.stop_gradient(adv_BT.astype(jnp.float32))
    return base.Credit(adv_BT=adv_BT, metrics=rewards.report(rollout, adv_BT))
