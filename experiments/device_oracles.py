"""Float64 references of the ops, numpy, gradients in closed form; what `experiments.device_check` holds a device to."""

from collections.abc import Sequence

import numpy as np
from scipy import special


def attention(
    q_BQHC, k_BSJC, v_BSJC, ranges: Sequence, dout_BQHC, dlse_BQH, *, scale: float, soft_cap: float
) -> dict[str, np.ndarray]:
    """Attention, lse, and the gradients of sum(out dout) + sum(lse dlse) for q, k and v.

    S = scale q k, capped;  P = exp(S - lse);  dS = P (dout v - sum(dout out) + dlse), times 1 - (S / cap)^2.
    """
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q_BQHC, k_BSJC, v_BSJC, dout_BQHC, dlse_BQH))
    group, S = q.shape[2] // k.shape[2], k.shape[1]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    lo1, hi1, lo2, hi2 = (np.asarray(x)[:, None, :, None] for x in ranges)
    key_S = np.arange(S)
    seen_B1QS = ((lo1 <= key_S) & (key_S < hi1)) | ((lo2 <= key_S) & (key_S < hi2))
    logit = scale * np.einsum("bqhc,bshc->bhqs", q, k)
    slope = np.ones_like(logit)
    if soft_cap:
        logit = soft_cap * np.tanh(logit / soft_cap)
        slope = 1 - (logit / soft_cap) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = special.logsumexp(np.where(seen_B1QS, logit, -np.inf), axis=-1)
        weight = np.where(seen_B1QS, np.exp(logit - lse[..., None]), 0.0)
    out = np.einsum("bhqs,bshc->bqhc", weight, v)
    along = np.einsum("bqhc,bqhc->bhq", dout, out) - np.moveaxis(dlse, 2, 1)
    dlogit = weight * (np.einsum("bqhc,bshc->bhqs", dout, v) - along[..., None]) * slope * scale
    shared = (*k.shape[:2], -1, group, k.shape[3])
    return {
        "out": out,
        "lse": np.moveaxis(lse, 1, 2),
        "dq": np.einsum("bhqs,bshc->bqhc", dlogit, k),
        "dk": np.einsum("bhqs,bqhc->bshc", dlogit, q).reshape(shared).sum(3),
        "dv": np.einsum("bhqs,bqhc->bshc", weight, dout).reshape(shared).sum(3),
    }


def _log_softmax(hidden_ND, unembed_DV) -> np.ndarray:
    return special.log_softmax(np.asarray(hidden_ND, np.float64) @ np.asarray(unembed_DV, np.float64), axis=1)


def token_logprob(hidden_ND, unembed_DV, target_N, dlogp_N, dentropy_N) -> dict[str, np.ndarray]:
    """Log-probs, entropy, and the gradients of sum(logp dlogp) + sum(entropy dentropy) for hidden and unembedding.

    dz = dlogp (1[v = y] - p) - dentropy p (log p + H)
    """
    logp_NV, N = _log_softmax(hidden_ND, unembed_DV), np.arange(len(target_N))
    p_NV = np.exp(logp_NV)
    entropy_N = -np.sum(p_NV * logp_NV, axis=1)
    hot_NV = np.zeros_like(p_NV)
    hot_NV[N, np.asarray(target_N)] = 1
    dz_NV = np.asarray(dlogp_N, np.float64)[:, None] * (hot_NV - p_NV)
    dz_NV -= np.asarray(dentropy_N, np.float64)[:, None] * p_NV * (logp_NV + entropy_N[:, None])
    return {"logp": logp_NV[N, np.asarray(target_N)], "entropy": entropy_N} | _pulled(dz_NV, hidden_ND, unembed_DV)


def forward_kl(student_ND, student_DV, teacher_ND, teacher_DV, dkl_N) -> dict[str, np.ndarray]:
    """KL(teacher || student) by token, and the gradients of sum(kl dkl) for the student: dz = dkl (p_s - p_t)."""
    log_s, log_t = _log_softmax(student_ND, student_DV), _log_softmax(teacher_ND, teacher_DV)
    dz_NV = np.asarray(dkl_N, np.float64)[:, None] * (np.exp(log_s) - np.exp(log_t))
    return {"kl": np.sum(np.exp(log_t) * (log_t - log_s), axis=1)} | _pulled(dz_NV, student_ND, student_DV)


def _pulled(dz_NV, hidden_ND, unembed_DV) -> dict[str, np.ndarray]:
    hidden, unembed = (np.asarray(x, np.float64) for x in (hidden_ND, unembed_DV))
    return {"dhidden": dz_NV @ unembed.T, "dunembed": hidden.T @ dz_NV}


def relative_error(found, true) -> float:
    """Greatest difference over the greatest true number; inf where one is no number and the other is."""
    found, true = np.asarray(found, np.float64), np.asarray(true, np.float64)
    same = (found == true) | (np.isnan(found) & np.isnan(true))  # -inf is the lse of a query that sees nothing
    finite = np.isfinite(true)
    if not np.all(same | (finite & np.isfinite(found))):
        return float("inf")
    worst = np.max(np.abs(found[finite] - true[finite]), initial=0.0)
    return float(worst / max(1e-30, np.max(np.abs(true[finite]), initial=0.0)))
