"""The budgets of the RL stage beside its updates, sampled tokens and time, and the learning rate that follows them."""

from rsi_jax import metrics, optim

PHASES = ("generate", "feedback", "annotate", "train")  # what rl.max_minutes counts: no evaluation, no report


def spent(rl, ledger: metrics.Ledger) -> float:
    """Says how much is spent of the budget that will end first: a share, 1 = all; 0 where there is none.

    rl: the config's; max_generated (tokens) and max_minutes (compute.clock) are budgets, 0 = none.
    """
    shares = [0.0]
    if rl.max_generated:
        shares.append(ledger.tokens["generated"] / rl.max_generated)
    if rl.max_minutes:
        seconds = ledger.state()["seconds"]
        shares.append(sum(seconds.get(name, 0.0) for name in PHASES) / 60 / rl.max_minutes)
    return max(shares)


def schedule(rl) -> str:
    """The schedule over updates: where tokens or time end the stage, the learning rate follows these instead."""
    return "constant" if rl.max_generated or rl.max_minutes else rl.schedule


def rate(rl, ledger: metrics.Ledger) -> float:
    """The factor on the updates of a batch, in [0, 1]: rl.schedule over what is spent of tokens or time."""
    return optim.decayed(rl.schedule, min(1.0, spent(rl, ledger)))
