"""Credit written a second time: what reads hinted readings, to distil them or to modulate advantages with them."""

import dataclasses
import math

import numpy as np

from rsi_jax import base
from tests.credit_oracles import AGREE, Expected, earned, mean, siblings, spread_out, std


def spans(batch):
    """(row, first token, tokens) of each view; tokens 0 for one without a weight."""
    columns = [batch.views[f"{name}_K"] for name in ("rollout", "span_start", "span_length", "weight")]
    return [(int(b), int(start), int(n) if w > 0 else 0) for b, start, n, w in zip(*columns, strict=True)]


def on_tokens(batch, reading):
    """The mean over the views of each sampled token of a row that counts, {(row, token): x}. Token 0 has no reading.

    reading(k, offset, b, t): what view k says of the token; a view of polarity -1 says the opposite.
    """
    said = {}
    for k, (b, start, n) in enumerate(spans(batch)):
        for offset in range(n):
            t = start + offset
            if batch.rows[b].counts and t in batch.rows[b].tokens and t > 0:
                said.setdefault((b, t), []).append(batch.views["polarity_K"][k] * reading(k, offset, b, t))
    return {place: mean(values) for place, values in said.items()}


def deltas(batch):
    """log T - log S where a teacher was asked."""
    teacher, student = batch.column["view_logp_KU"], batch.column["logp_BT"]
    return on_tokens(batch, lambda k, offset, b, t: teacher[k, offset] - student[b, t])


def modulated(batch, found, change):
    """change(A, row, turn, token) for each advantage of an inner credit."""
    return dataclasses.replace(found, adv=spread_out(batch, lambda b, k, t: change(found.adv[b, t], b, k, t)))


def clipped(x, bound):
    return min(max(x, -bound), bound)


def sign(x):
    return int(x > 0) - int(x < 0)


# --- feedback.py -----------------------------------------------------------------------------------------------------


def passes(batch, b, failed_only, success_return):
    row = batch.rows[b]
    if not row.counts or not failed_only:
        return row.counts
    best = max(earned(batch, siblings(batch, b))) - AGREE if success_return is None else success_return
    return row.earned < best


def textual_feedback(
    batch, *, inner, weight=1.0, divergence="forward_kl", alpha=0.5, top_k=0, clip=0.0, entry_clip=0.0, temperature=1.0,
    failed_only=False, success_return=None,
):  # fmt: skip
    used = [n > 0 and passes(batch, b, failed_only, success_return) for b, _, n in spans(batch)]
    worth = batch.views["weight_K"] * batch.views["polarity_K"]
    views = [weight * w / sum(used) if use else 0.0 for w, use in zip(worth, used, strict=True)]
    pull = base.Divergence(
        name=divergence, alpha=alpha, top_k=top_k, clip=clip, entry_clip=entry_clip, temperature=temperature
    )
    return dataclasses.replace(inner(batch), views=np.array(views), divergence=pull)


def sdpo(
    batch, *, inner, weight=1.0, outcome_weight=0.0, alpha=0.5, top_k=100, is_clip=2.0, success_return=0.5
):  # fmt: skip
    def is_open(b):
        if not batch.rows[b].counts:
            return False
        others = [batch.rows[i].earned for i in siblings(batch, b) if i != b]
        return batch.rows[b].earned < success_return or any(r >= success_return for r in others)

    tokens = [n if is_open(b) else 0 for b, _, n in spans(batch)]
    worth = batch.views["weight_K"] * batch.views["polarity_K"]
    views = [weight * w * n / max(sum(tokens), 1) for w, n in zip(worth, tokens, strict=True)]
    name = "forward_kl" if alpha == 0 else "reverse_kl" if alpha == 1 else "jsd"
    pull = base.Divergence(name=name, alpha=alpha, top_k=top_k, is_clip=is_clip)
    return Expected(outcome_weight * inner(batch).adv, views=np.array(views), divergence=pull)


def locator_penalty(batch, *, inner, penalty=1.0, failed_only=False, success_return=None):
    located = set()
    for b, start, n in spans(batch):
        if passes(batch, b, failed_only, success_return):
            located |= {(b, t) for t in range(start, start + n)}
    return modulated(batch, inner(batch), lambda a, b, k, t: a - penalty if (b, t) in located else a)


# --- modulate.py -----------------------------------------------------------------------------------------------------


def rlsd(batch, *, inner, mix=0.5, clip=0.2):
    delta = deltas(batch)

    def change(a, b, k, t):
        gain = math.exp(sign(a) * delta.get((b, t), 0.0))
        return a * ((1 - mix) + mix * min(max(gain, 1 - clip), 1 + clip))

    return modulated(batch, inner(batch), change)


def opd(batch, *, inner, weight=1.0, clip=0.0):
    delta = deltas(batch)
    return modulated(
        batch, inner(batch), lambda a, b, k, t: a + weight * clipped(delta.get((b, t), 0.0), clip or math.inf)
    )


def vopd(batch, *, inner, weight=1.0, clip=0.0):
    kls = batch.column["view_kl_KU"]
    delta, kl = deltas(batch), on_tokens(batch, lambda k, offset, b, t: kls[k, offset])
    more = {place: weight * clipped(x + kl[place], clip or math.inf) for place, x in delta.items()}
    return modulated(batch, inner(batch), lambda a, b, k, t: a + more.get((b, t), 0.0))


def agent_opsd(batch, *, inner, mix=0.5, clip=0.2, discount=0.95, success_return=0.5, prior_clip=0.05):
    delta, found, gains = deltas(batch), inner(batch), {}
    for b, row in enumerate(batch.rows):
        if not row.counts:
            continue
        solved = mean([float(r >= success_return) for r in earned(batch, siblings(batch, b))])
        prior = min(max(solved, prior_clip), 1 - prior_clip)
        carried, belief, moves = 0.0, prior, []
        for turn in row.turns:
            carried = discount * carried + sum(delta.get((b, t), 0.0) for t in turn.tokens)
            now = 1 / (1 + math.exp(-(math.log(prior / (1 - prior)) + carried)))
            moves.append(sign(sum(found.adv[b, t] for t in turn.tokens)) * (now - belief))
            belief = now
        width = std(moves)
        for k, q in enumerate(moves):
            z = (q - mean(moves)) / width if width > AGREE else 0.0
            gains[b, k] = min(max(1 + clip * z, 1 - clip), 1 + clip)
    return modulated(batch, found, lambda a, b, k, t: a * ((1 - mix) + mix * gains[b, k]))


def rlcsd(batch, *, inner, temperature=0.02, beta=1.0, mix=0.5, bound=2.0, threshold=0.02):
    right, wrong = batch.column["view_logp_KU"], batch.column["wrong_logp_KU"]
    contrast = on_tokens(batch, lambda k, offset, b, t: right[k, offset] - wrong[k, offset])

    def change(a, b, k, t):
        if (b, t) not in contrast or a == 0:
            return a
        part = clipped(beta * mix * math.tanh(contrast[b, t] / temperature), bound)
        moved = a + part if abs(part) > threshold else a
        return max(moved, 0.0) if a > 0 else min(moved, 0.0)

    return modulated(batch, inner(batch), change)
