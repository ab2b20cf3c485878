"""Every credit variant keeps the laws that its row says it keeps, and breaks the others by a counter-example."""

import numpy as np
import pytest

from rsi_jax import base, credit
from rsi_jax.credit import laws
from rsi_jax.credit.rows import ROWS


def test_every_variant_has_a_row_and_every_law_has_a_sentence():
    assert set(ROWS) == set(credit.variants())
    assert {law for row in ROWS.values() for law in row.breaks} <= set(laws.LAWS)
    assert all(law.__doc__ for law in laws.LAWS.values())


@pytest.mark.parametrize("law", laws.LAWS)
def test_a_law_holds_for_all_but_those_whose_row_says_so(law):
    measured = laws.measure(law)
    broken = {name for name, (deviation, _) in measured.items() if not deviation <= laws.TOLERANCE}
    assert broken == {name for name in measured if law in ROWS[name].breaks}, {n: measured[n] for n in broken}


def test_a_law_can_fail():
    """Of a variant that breaks every rule of the house, the laws say so."""

    def reckless(rollout: base.Rollout) -> base.Credit:
        wild_BT = rollout.logp_BT * rollout.tokens_BT + rollout.return_B[:, None]
        return base.Credit(adv_BT=wild_BT, metrics={"frac_zero_adv": 0.0, "nonfinite_rewards": 0.0})

    rollout = laws.random(0)
    assert not np.isfinite(laws.gap(reckless(rollout), reckless(rollout.replace(logp_BT=rollout.logp_BT * np.nan))))
    moved = rollout.replace(tokens_BT=rollout.tokens_BT + 1)
    assert laws.gap(reckless(rollout), reckless(moved)) > laws.TOLERANCE
