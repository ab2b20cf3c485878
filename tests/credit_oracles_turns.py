"""Credit written a second time: rewards of turns, recurring states, critics, sampled values, hindsight."""

import dataclasses
import math

import numpy as np

from tests.credit_oracles import (
    AGREE,
    Expected,
    agree,
    compared,
    earned,
    mean,
    siblings,
    spread_out,
    std,
    to_go,
)

EDGES = (-1e-6, 1e-6, 0.5)


def added(batch, inner, value):
    """The credit of `inner`, and value(row, turn) on top."""
    found = inner(batch)
    return dataclasses.replace(found, adv=found.adv + spread_out(batch, lambda b, k, t: value(b, k)))


# --- turnwise.py -----------------------------------------------------------------------------------------------------


def turn_rloo(batch, *, discount=1.0):
    found = [to_go(row, discount) for row in batch.rows]

    def value(b, k, t):
        at = {i: found[i][k] if k < len(found[i]) else 0.0 for i in siblings(batch, b)}
        if agree(list(at.values())):
            return 0.0
        return at[b] - mean([g for i, g in at.items() if i != b])

    return Expected(spread_out(batch, value))


def mt_grpo(batch, *, turn_weight=1.0, outcome_weight=1.0, scale="std", std_floor=1e-6):
    def value(b, k, t):
        row, group = batch.rows[b], siblings(batch, b)
        outcome = compared(row.turns[-1].reward, [batch.rows[i].turns[-1].reward for i in group], scale, std_floor)
        if k == len(row.turns) - 1:
            return outcome_weight * outcome
        at = [batch.rows[i].turns[k].reward for i in group if k < len(batch.rows[i].turns) - 1]
        return outcome_weight * outcome + turn_weight * compared(row.turns[k].reward, at, scale, std_floor)

    return Expected(spread_out(batch, value))


def prm(batch, *, inner, weight=1.0, form="difference"):
    judge = batch.column["judge_BS"]

    def scores(b):
        return [judge[b, k] for k in range(len(batch.rows[b].turns))]

    def difference(b, k):
        now = judge[b, k]
        if k > 0:
            before = judge[b, k - 1]
        else:
            known = [judge[i, 0] for i in siblings(batch, b) if math.isfinite(judge[i, 0])]
            before = mean(known) if known and not agree(known) else now
        return now - before if math.isfinite(now) and math.isfinite(before) else 0.0

    def ahead(b, k):
        neutral = 0.0 if form == "sum" else 1.0
        rest = [p if math.isfinite(p) else neutral for p in scores(b)[k:]]
        return sum(rest) if form == "sum" else min(rest)

    def value(b, k):
        if form == "difference":
            return weight * difference(b, k)
        return weight * (ahead(b, k) - mean([ahead(i, 0) for i in siblings(batch, b)]))

    return added(batch, inner, value)


def pbrs(batch, *, inner, weight=1.0, discount=1.0):
    judge, rows = batch.column["judge_BS"], []
    for b, row in enumerate(batch.rows):
        potential = [0.0] + [judge[b, k] if math.isfinite(judge[b, k]) else 0.0 for k in range(len(row.turns))]
        turns, change = [], 0.0
        for k, turn in enumerate(row.turns):
            shaping = weight * (discount * turn.discount * potential[k + 1] - potential[k])
            turns.append(dataclasses.replace(turn, reward=turn.reward + shaping))
            change += shaping
        rows.append(dataclasses.replace(row, turns=turns, earned=row.earned + change))
    return inner(dataclasses.replace(batch, rows=rows))


def igpo(batch, *, weight=0.1, discount=1.0, std_floor=1e-6):
    chance = np.exp(batch.column["answer_logp_BS"])

    def gain(b, k):
        step = chance[b, k + 1] - chance[b, k]
        return step if math.isfinite(step) else 0.0

    def steps(b):
        """z of each turn's own reward: its gain, or for the last turn the outcome; each among its like."""
        group, last = siblings(batch, b), len(batch.rows[b].turns) - 1
        gains = [gain(i, k) for i in group for k in range(len(batch.rows[i].turns) - 1)]
        outcomes = [batch.rows[i].turns[-1].reward for i in group]
        z = [weight * compared(gain(b, k), gains, "std", std_floor) for k in range(last)]
        return [*z, compared(batch.rows[b].turns[-1].reward, outcomes, "std", std_floor)]

    found = [to_go(row, discount, steps(b)) if row.counts else [] for b, row in enumerate(batch.rows)]
    return Expected(spread_out(batch, lambda b, k, t: found[b][k]))


# --- anchor.py -------------------------------------------------------------------------------------------------------


def gigpo(batch, *, inner, omega=1.0, discount=0.95, scale="none", std_floor=1e-6):
    def value(b, k):
        anchor, met = batch.rows[b].turns[k].anchor, []
        if anchor == -1:
            return 0.0
        for i in siblings(batch, b):
            togo = to_go(batch.rows[i], discount)
            met += [togo[j] for j, turn in enumerate(batch.rows[i].turns) if turn.anchor == anchor]
        return omega * compared(to_go(batch.rows[b], discount)[k], met, scale, std_floor)

    return added(batch, inner, value)


# --- critic.py -------------------------------------------------------------------------------------------------------


def advantages(rewards, discounts, values, after, lambda_):
    """A_t = Σ_l (Π γλ) δ_{t+l}, δ_t = r_t + γ_t V_{t+1} - V_t, V after the last step = `after`."""
    nexts = [*values[1:], after]
    errors = [r + g * n - v for r, g, n, v in zip(rewards, discounts, nexts, values, strict=True)]
    found = []
    for t in range(len(errors)):
        total, factor = 0.0, 1.0
        for u in range(t, len(errors)):
            total += factor * errors[u]
            factor *= discounts[u] * lambda_
        found.append(total)
    return found


def token_steps(row, discount):
    rewards, discounts = [], []
    for turn in row.turns:
        rewards += [0.0] * (len(turn.tokens) - 1) + [turn.reward]
        discounts += [discount] * (len(turn.tokens) - 1) + [discount * turn.discount]
    return rewards, discounts


def of_critic(batch, found, scale):
    """Columns of {(row, token): (A, target)}; a row that does not count has its values as targets."""
    value, target = batch.column["value_BT"], np.zeros((len(batch.rows), batch.T))
    for b, row in enumerate(batch.rows):
        for t in row.tokens:
            target[b, t] = found[b, t][1] if row.counts else value[b, t]
    adv = spread_out(batch, lambda b, k, t: found[b, t][0])
    if scale == "std":
        every = [adv[b, t] for b, row in enumerate(batch.rows) if row.counts for t in row.tokens]
        centre, width = mean(every), std(every)
        adv = spread_out(batch, lambda b, k, t: (found[b, t][0] - centre) / width if width > AGREE else 0.0)
    return Expected(adv, target)


def gae(batch, *, discount=1.0, lambda_=0.95, scale="none"):
    return token_critic(batch, discount, lambda length: lambda_, lambda length: lambda_, scale)


def vapo(batch, *, alpha=0.05, discount=1.0, scale="none"):
    return token_critic(batch, discount, lambda length: max(0.0, 1 - 1 / (alpha * length)), lambda length: 1.0, scale)


def token_critic(batch, discount, policy_lambda, critic_lambda, scale):
    found = {}
    for b, row in enumerate(batch.rows):
        values, end = [batch.column["value_BT"][b, t] for t in row.tokens], batch.column["end_value_B"][b]
        steps = (*token_steps(row, discount), values, end)
        adv = advantages(*steps, policy_lambda(len(values)))
        learnt = advantages(*steps, critic_lambda(len(values)))
        for t, a, c, v in zip(row.tokens, adv, learnt, values, strict=True):
            found[b, t] = (a, c + v)
    return of_critic(batch, found, scale)


def turn_gae(batch, *, discount=0.99, lambda_=0.9, scale="none"):
    found = {}
    for b, row in enumerate(batch.rows):
        values = [batch.column["value_BT"][b, turn.tokens[0]] for turn in row.turns]
        rewards, discounts = [turn.reward for turn in row.turns], [discount * turn.discount for turn in row.turns]
        adv = advantages(rewards, discounts, values, batch.column["end_value_B"][b], lambda_)
        for turn, a, v in zip(row.turns, adv, values, strict=True):
            found |= {(b, t): (a, a + v) for t in turn.tokens}
    return of_critic(batch, found, scale)


# --- sampled.py ------------------------------------------------------------------------------------------------------


def between(batch, is_place):
    """Σ of the rewards that land between two valued places, + V at the second (0 after the end) - V at the first."""
    value = batch.column["mc_value_BT"]

    def credit(b, k, t):
        row = batch.rows[b]
        places = [u for j, turn in enumerate(row.turns) for u in turn.tokens if is_place(b, j, u)]
        valued = [u for u in places if math.isfinite(value[b, u])]
        before, after = [u for u in valued if u <= t], [u for u in valued if u > t]
        if not before:
            return 0.0
        start, end = before[-1], after[0] if after else batch.T
        landed = sum(turn.reward for turn in row.turns if start <= turn.tokens[-1] < end)
        return landed + (value[b, end] if after else 0.0) - value[b, start]

    return credit


def vineppo(batch):
    return Expected(spread_out(batch, between(batch, lambda b, k, t: t == batch.rows[b].turns[k].tokens[0])))


def spo(batch, *, prob_max=0.9):
    credit, logp = between(batch, lambda b, k, t: True), batch.column["logp_BT"]
    return Expected(spread_out(batch, lambda b, k, t: credit(b, k, t) if math.exp(logp[b, t]) <= prob_max else 0.0))


def tree_grpo(batch, *, scale="std", std_floor=1e-6):
    tree = batch.column["tree_B"]

    def value(b, k, t):
        leaves = [i for i, row in enumerate(batch.rows) if row.counts and tree[i] == tree[b]]
        both = [earned(batch, rows) for rows in (leaves, siblings(batch, b))]
        return sum(compared(batch.rows[b].earned, values, scale, std_floor) for values in both)

    return Expected(spread_out(batch, value))


# --- hindsight.py ----------------------------------------------------------------------------------------------------


def hcapo(
    batch, *, inner, omega=1.0, discount=0.95, temperature=5.0, clip_low=0.8, clip_high=1.2,
    denominator="trajectory", smooth=False, success_return=0.5, std_floor=1e-6,
):  # fmt: skip
    def chances(b, column):
        logp = batch.column[column][b]
        return [math.exp(mean([logp[t] for t in turn.tokens]) / temperature) for turn in batch.rows[b].turns]

    def qualities(b):
        row, told = batch.rows[b], chances(b, "hindsight_logp_BT")
        untold = chances(b, "logp_BT") if denominator == "policy" else [mean(told)] * len(told)
        found = []
        for k, (with_it, without) in enumerate(zip(told, untold, strict=True)):
            ratio = min(max(with_it / without, clip_low), clip_high)
            found.append(ratio * discount ** (len(told) - 1 - k) * row.earned)
        if smooth:
            found = [*((q + after) / 2 for q, after in zip(found, found[1:], strict=False)), found[-1]]
        return found

    known = [qualities(b) if row.counts else [] for b, row in enumerate(batch.rows)]

    def value(b, k):
        z = compared(known[b][k], [q for i in siblings(batch, b) for q in known[i]], "std", std_floor)
        return omega * (max(z, 0.0) if batch.rows[b].earned >= success_return else z)

    return added(batch, inner, value)


def surplus(batch, b, t, outcome, edges, clip):
    """1 - π / h for the class of an outcome: how many of the edges it reaches."""
    log_ratio = batch.column["logp_BT"][b, t] - batch.column["outcome_logp_BTM"][b, t, sum(outcome >= e for e in edges)]
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    return 1.0 - (min(ratio, clip) if clip else ratio)


def hca(batch, *, edges=EDGES, clip=0.0):
    def value(b, k, t):
        togo = to_go(batch.rows[b])[k]
        return surplus(batch, b, t, togo, edges, clip) * togo

    return Expected(spread_out(batch, value))


def cocoa(batch, *, edges=EDGES, clip=0.0):
    def value(b, k, t):
        total, factor = 0.0, 1.0
        for turn in batch.rows[b].turns[k:]:
            total += factor * turn.reward * surplus(batch, b, t, turn.reward, edges, clip)
            factor *= turn.discount
        return total

    return Expected(spread_out(batch, value))
