"""Measures the arms of `experiments.credit_fidelity` in one world: credit once per seed, then every measure of it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import fidelity_arms
from experiments.fidelity_arms import Arm, Case, Drawn
from rsi_jax.envs import exact
from rsi_jax.envs.exact import columns
from rsi_jax.evals import fidelity


def measure(
    case: Case, arms: Mapping[str, Arm], seeds: Sequence[int], *, groups: int
) -> dict[str, list[dict[str, Any]]]:
    """Measures each arm that fits the horizon over seeds: {arm: [readings of a seed]}.

    Readings: cosine, sign_accuracy, spearman, bias, variance, snr, confidence (see evals.fidelity), gradient_cosine of
    the whole batch, and curve: the same by number of rollouts, with the tokens that these and their columns cost.
    """
    arms = {name: arm for name, arm in arms.items() if case.horizon <= arm.longest}
    bound = {name: arm.bind(case) for name, arm in arms.items()}

    # Runs once per seed and takes longer to compile than to run: it is not optimised.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def credits(rollouts, added):
        return {
            name: function(rollouts[arms[name].forked].replace(**added[name])).adv_BT
            for name, (function, _) in bound.items()
        }

    found = {name: [] for name in arms}
    for seed in seeds:
        kinds = {arm.forked for arm in arms.values()}
        drawn = {forked: fidelity_arms.draw(case, seed, groups=groups, forked=forked) for forked in kinds}
        made = {name: arm.columns(drawn[arm.forked]) for name, arm in arms.items()}
        # Only what an arm reads goes in, so that all arms share the rest of the program.
        added = {name: {field: getattr(made[name][0], field) for field in bound[name][1]} for name in arms}
        adv = credits({forked: one.sample.rollout for forked, one in drawn.items()}, added)
        for name, arm in arms.items():
            found[name].append(readings(drawn[arm.forked], np.asarray(adv[name]), made[name][1]))
    return found


def readings(drawn: Drawn, adv_BT: np.ndarray, extra_tokens: int) -> dict[str, Any]:
    """All measures of one credit. extra_tokens: sampled beside the rollouts, to make the columns it read."""
    world, path = drawn.case.tables, drawn.sample.path
    played_BH, state_BH, action_BH = (np.asarray(x) for x in (path.played_BH, path.state_BH, path.action_BH))
    adv_BH = np.zeros(played_BH.shape)
    adv_BH[played_BH] = adv_BT[np.asarray(drawn.sample.rollout.mask_BT)]
    truth_BH = columns.looked_up(path, exact.values(world, drawn.logits).adv_HNA)
    adv_N, truth_N = adv_BH[played_BH], truth_BH[played_BH]
    H, N, A, _ = world.prob_HNAJ.shape
    cell_BH = (np.arange(H) * N + state_BH) * A + action_BH
    group_B = np.asarray(drawn.sample.rollout.group_B)
    gradient_GHNA = fidelity.gradients(adv_BH, state_BH, action_BH, exact.policy(world, drawn.logits), group_B)
    exact_HNA = exact.policy_gradient(world, drawn.logits)
    groups, tokens = len(gradient_GHNA), int(played_BH.sum()) + extra_tokens
    curve = [
        {
            "rollouts": n * fidelity_arms.SIZE,
            "tokens": tokens * n / groups,
            "gradient_cosine": fidelity.gradient_cosine(gradient_GHNA, exact_HNA, n),
        }
        for n in (2**i for i in range(groups.bit_length()))
        if n <= groups
    ]
    return {
        "cosine": fidelity.cosine(adv_N, truth_N),
        "sign_accuracy": fidelity.sign_accuracy(adv_N, truth_N),
        "spearman": fidelity.rank_correlation(adv_N, truth_N),
        **fidelity.noise(adv_N, truth_N, cell_BH[played_BH]),
        "confidence": fidelity.confidence(adv_BH, path.logp_BH, played_BH),
        "gradient_cosine": fidelity.gradient_cosine(gradient_GHNA, exact_HNA, groups),
        "curve": curve,
    }
