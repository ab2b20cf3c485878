"""Lists every credit variant with its source, its knobs, and which laws it keeps, measured from the code as it is.

python -m experiments.list_variants                      # all variants, all laws
python -m experiments.list_variants --names=grpo,vineppo
python -m experiments.list_variants --laws=shift,causal --json

A law is measured on random rollouts (rsi_jax/credit/laws.py): it holds if no number differs by more than 2e-5; where it
does not, the seed and the difference are the counter-example. A law that says nothing of a variant is not listed with
it. Variants are distinct if their credit differs on these rollouts at published knobs.

stdout ends with one JSON line: variants [{name, source, knobs, needs, laws {law: {holds, deviation, seed}}}], distinct.
--json: that line alone.
"""

import inspect
import os
import re
from typing import Any

from experiments import cli

FLAGS = cli.Flags()
_NAMES = FLAGS.list("names", [], "variants (default: all)")
_LAWS = FLAGS.list("laws", [], "laws to measure (default: all)")
_JSON = FLAGS.bool("json", False, "print nothing but the JSON line")


def source_of(doc: str) -> str:
    """The text of `Source:` in a docstring, in one line."""
    found = re.search(r"^\s*Source:(.*?)(?=\n\s*\n|\n\s*(?:Differs|Raises|Args|Returns):|\Z)", doc, re.S | re.M)
    return " ".join(found[1].split()) if found else ""


def knobs_of(name: str) -> dict[str, Any]:
    """The published knobs of a variant, as the default config has them."""
    from configs import default

    return default.get_config().credit[name].to_dict()


def distinct(found: dict[str, Any]) -> int:
    """How many of the credits differ from all before them."""
    from rsi_jax.credit import laws

    kept: list[Any] = []
    for own in found.values():
        same = (set(laws.outputs(own)) == set(laws.outputs(other)) and laws.gap(own, other) == 0 for other in kept)
        if not any(same):
            kept.append(own)
    return len(kept)


def main(_) -> None:
    wanted = chosen_names()
    os.environ["RSI_JAX_VARIANTS"] = ",".join(wanted)
    from rsi_jax import credit, metrics
    from rsi_jax.credit import laws

    rows = {name: {"name": name, "source": "", "knobs": knobs_of(name), "laws": {}} for name in wanted}
    for name, row in rows.items():
        function, needs = credit.find(name)
        row["source"], row["needs"] = source_of(inspect.getdoc(function) or ""), list(needs)
    for law in cli.chosen(_LAWS.value, laws.LAWS, "laws"):
        for name, (deviation, seed) in laws.measure(law).items():
            held = {"holds": deviation <= laws.TOLERANCE, "deviation": deviation, "seed": seed}
            rows[name]["laws"][law] = held
    count = distinct(laws.run(laws.random(0)))
    if not _JSON.value:
        show(list(rows.values()), {law: laws.LAWS[law].__doc__ or "" for law in laws.LAWS}, count)
    metrics.finish({"variants": list(rows.values()), "distinct": count})


def chosen_names() -> list[str]:
    from rsi_jax import credit

    return cli.chosen(_NAMES.value, credit.variants(), "names")


def show(rows: list[dict[str, Any]], sentences: dict[str, str], count: int) -> None:
    """Prints the laws, and each variant with what it breaks and by how much, for people."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console()
    table = Table("law", "says", title="Laws")
    for law, sentence in sentences.items():
        table.add_row(law, sentence)
    console.print(table)
    for row in rows:
        kept = [law for law, held in row["laws"].items() if held["holds"]]
        broken = [f"{law} {x['deviation']:.3g} (seed {x['seed']})" for law, x in row["laws"].items() if not x["holds"]]
        knobs = [f"{name}={value}" for name, value in row["knobs"].items()]
        console.print(f"\n[bold]{row['name']}[/bold]  {row['source']}", highlight=False)
        for title, words in (("knobs", knobs), ("needs", row["needs"]), ("keeps", kept), ("breaks", broken)):
            if words:
                console.print(Padding(f"{title:7s}{', '.join(words)}", (0, 0, 0, 2)), highlight=False, markup=False)
    console.print(f"{len(rows)} variants, {count} of them distinct")


if __name__ == "__main__":
    cli.run(main, FLAGS)
