"""Credit assignment: each variant is a pure function of a rollout, found by its name.

    function, needs = credit.find("grpo")
    credit_fn = functools.partial(function, scale="none")       # a base.CreditFn

A variant is a public function `(rollout, *, knobs) -> base.Credit` of a family module; NEEDS beside it names the
columns it reads, for the stages that make them. A variant that wraps another takes it as `inner`.
"""

import inspect
from collections.abc import Callable

from rsi_jax import base
from rsi_jax.credit import anchor, critic, feedback, group, hindsight, modulate, sampled, turnwise

FAMILIES = (group, turnwise, anchor, critic, sampled, hindsight, feedback, modulate)


def variants() -> dict[str, Callable[..., base.Credit]]:
    """Lists every variant by name: the public functions that the family modules define."""
    return {
        name: function
        for family in FAMILIES
        for name, function in inspect.getmembers(family, inspect.isfunction)
        if function.__module__ == family.__name__ and not name.startswith("_")
    }


def find(name: str) -> tuple[Callable[..., base.Credit], tuple[str, ...]]:
    """Finds a variant: (the function, the columns it needs beside the sampled ones).

    The columns of a wrapped `inner` come on top.

    Raises: base.InputError for an unknown name, with the nearest one.
    """
    known = variants()
    if name not in known:
        mend = base.did_you_mean(name, known)
        raise base.InputError(f"unknown credit.name '{name}': one of {', '.join(sorted(known))}{mend}")
    needs = {key: columns for family in FAMILIES for key, columns in family.NEEDS.items()}
    return known[name], needs.get(name, ())
