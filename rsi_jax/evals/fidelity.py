"""How near a credit comes to the truth: measures over sampled tokens, and of the gradient that they make.

The truth A is the exact advantage of each sampled token (envs.exact). All measures but bias and variance ignore the
scale of the credit. Host arrays, float64.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

TINY = 1e-6  # of the largest: what is no larger counts as 0


def cosine(x, y) -> float:
    """x·y / (|x| |y|) of two arrays, flattened; 0 where one of them is 0."""
    x, y = (np.asarray(z, np.float64).ravel() for z in (x, y))
    size = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / size) if size > 0 else 0.0


def sign_accuracy(adv_N, truth_N) -> float:
    """Share of the tokens with a true advantage (|A| above 1e-6 of the largest) whose credit has its sign."""
    adv_N, truth_N = np.asarray(adv_N), np.asarray(truth_N)
    matters_N = abs(truth_N) > TINY * abs(truth_N).max(initial=0.0)
    given_N = np.where(abs(adv_N) > TINY * abs(adv_N).max(initial=0.0), np.sign(adv_N), 0)
    return float(np.mean(given_N[matters_N] == np.sign(truth_N[matters_N]))) if matters_N.any() else 0.0


def rank_correlation(adv_N, truth_N) -> float:
    """Spearman's ρ; 0 where one of them is constant."""
    if np.ptp(adv_N) == 0 or np.ptp(truth_N) == 0:
        return 0.0
    return float(stats.spearmanr(adv_N, truth_N).statistic)


def noise(adv_N, truth_N, cell_N) -> dict[str, float | None]:
    """Bias, variance and signal-to-noise of the credit of one decision, over the times that it was taken.

      variance = mean Var[Â | cell],  bias² = mean (E[Â | cell] - A)²,  snr = mean E[Â | cell]² / variance

    Means over tokens of cells that were met twice or more; squares of estimated means are corrected by variance / n.

    Args:
      adv_N, truth_N: credit and A of each token, in units of the return.
      cell_N: int, the (turn, state, action) of each; equal in cell = equal in truth.

    Returns: bias (root mean square, >= 0), variance, snr (None where there is no noise, or no cell met twice).
    """
    _, cell_N = np.unique(np.asarray(cell_N), return_inverse=True)
    adv_N, truth_N = np.asarray(adv_N, np.float64), np.asarray(truth_N, np.float64)
    count_C = np.bincount(cell_N)
    mean_C = np.bincount(cell_N, adv_N) / count_C
    spread_C = np.bincount(cell_N, (adv_N - mean_C[cell_N]) ** 2) / np.maximum(count_C - 1, 1)
    true_C = np.bincount(cell_N, truth_N) / count_C
    weight_C = np.where(count_C > 1, count_C, 0)
    if not weight_C.any():
        return {"bias": None, "variance": None, "snr": None}
    share_C = weight_C / weight_C.sum()
    variance = float(share_C @ spread_C)
    luck = float(share_C @ (spread_C / count_C))
    bias = float(np.sqrt(max(share_C @ (mean_C - true_C) ** 2 - luck, 0.0)))
    signal = max(float(share_C @ mean_C**2) - luck, 0.0)
    noiseless = variance <= TINY**2 * max(float(share_C @ mean_C**2), TINY**2)
    return {"bias": bias, "variance": variance, "snr": None if noiseless else signal / variance}


def confidence(adv_BH, logp_BH, played_BH) -> float:
    """Correlation of credit with log-prob among the turns of a rollout: does it reward being sure?

    Both as deviations from their mean over the rollout; 0 where a rollout's turns all get the same.
    """
    played_BH = np.asarray(played_BH)
    count_B1 = played_BH.sum(1, keepdims=True)

    def within(x_BH):
        x_BH = np.where(played_BH, np.asarray(x_BH, np.float64), 0.0)
        off_BH = np.where(played_BH, x_BH - x_BH.sum(1, keepdims=True) / count_B1, 0.0)
        return np.where(abs(off_BH) > TINY * max(abs(x_BH).max(), TINY), off_BH, 0.0)

    return cosine(within(adv_BH), within(logp_BH))


def gradients(adv_BH, state_BH, action_BH, pi_HNA, group_B) -> np.ndarray:
    """The estimated policy gradient of each group: mean over its rollouts of Σ_t Â_t ∇ log π(a_t | t, s_t).

    By logits [H, N, A], in float64 [groups, H, N, A]: Â (1[a] - π(a)) at the states that were met.

    Args:
      adv_BH: credit of each turn; 0 beyond the end of an episode.
      state_BH, action_BH: int.
      pi_HNA: the policy.
      group_B: int, in [0, groups).
    """
    (B, H), (_, N, A) = np.shape(adv_BH), np.shape(pi_HNA)
    groups = int(np.max(group_B)) + 1
    h_BH = np.broadcast_to(np.arange(H), (B, H))
    group_BH = np.broadcast_to(np.asarray(group_B)[:, None], (B, H))
    score_BHA = np.eye(A)[np.asarray(action_BH)] - np.asarray(pi_HNA)[h_BH, np.asarray(state_BH)]
    total = np.zeros((groups, H, N, A))
    np.add.at(total, (group_BH, h_BH, np.asarray(state_BH)), np.asarray(adv_BH, np.float64)[..., None] * score_BHA)
    return total / np.bincount(group_B)[:, None, None, None]


def gradient_cosine(gradient_GHNA, exact_HNA, groups: int) -> float:
    """Cosine with the exact gradient of the mean over `groups` groups, averaged over disjoint sets of so many."""
    sets = len(gradient_GHNA) // groups
    taken = np.asarray(gradient_GHNA)[: sets * groups].reshape(sets, groups, -1).mean(1)
    return float(np.mean([cosine(one, exact_HNA) for one in taken]))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and Student's 95% interval over seeds: (mean, low, high); the mean three times where all agree."""
    x = np.asarray(values, np.float64)
    mean, error = float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")
    half = float(stats.t.ppf(0.975, len(x) - 1)) * error if error else 0.0
    return mean, mean - half, mean + half
