"""Mutants of the credit variants and the losses that change nothing which a caller can see, each with its reason."""

# (function, line, mutated line, why)
EQUIVALENT: tuple[tuple[str, str, str, str], ...] = ()
