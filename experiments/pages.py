"""Tables of results as Markdown, and the places in README.md where they stand; nothing is typed by hand.

An experiment writes its table beside its rows (results/<name>.md); --write puts it into README.md too, between the
lines `<!-- <name> -->` and `<!-- end -->`.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

PAGE = pathlib.Path("README.md")
END = "<!-- end -->"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; a cell may hold a | of its own, None is a dash, a share has two or three digits."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def share(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A share as .93, with its interval as .93 [.90, .95] where there is one."""
    if value is None:
        return "-"
    short = [f"{x:.2f}".replace("0.", ".", 1) for x in (value, low, high) if x is not None]
    return short[0] if len(short) == 1 else f"{short[0]} [{short[1]}, {short[2]}]"


def count(value: float | None, bound: bool = False) -> str:
    """A number of tokens or seconds as 320k, 4.1M or 95; bound: a lower bound, marked so."""
    if value is None:
        return "-"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            scaled = value / size
            text = f"{scaled:.3g}{letter}" if scaled < 100 else f"{scaled:.0f}{letter}"
            break
    else:
        text = f"{value:.0f}"
    return f"> {text}" if bound else text


def put(name: str, text: str, page: pathlib.Path = PAGE) -> None:
    """Puts a table into a page, in the place of the one of that name. Raises: base.InputError without the place."""
    from rsi_jax import base

    before, found, rest = page.read_text().partition(f"<!-- {name} -->\n")
    old, ended, after = rest.partition(END)
    if not found or not ended:
        raise base.InputError(f"{page} has no place for the table: lines '<!-- {name} -->' and '{END}'")
    fresh = page.with_name(page.name + ".new")
    fresh.write_text(f"{before}{found}{text}{ended}{after}")
    os.replace(fresh, page)


def keep(results: pathlib.Path, text: str, *, write: bool) -> pathlib.Path:
    """Writes a table beside its rows, and into README.md where asked; returns its file."""
    file = results.with_suffix(".md")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if write:
        put(results.stem, text)
    return file
