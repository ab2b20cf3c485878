"""Tables for pages: cells by hand, places that are found or named, and README.md holds what the results say."""

import pathlib

import pytest

from experiments import pages
from rsi_jax import base

ROOT = pathlib.Path(__file__).parents[1]


def test_cells_by_hand():
    assert pages.share(0.934, 0.9, 1.0) == ".93 [.90, 1.00]" and pages.share(0.0) == ".00" and pages.share(None) == "-"
    assert pages.count(320_401) == "320k" and pages.count(4_120_000, bound=True) == "> 4.12M"
    assert pages.count(95.2) == "95" and pages.count(None) == "-" and pages.count(1_234) == "1.23k"
    assert pages.table(("a", "b"), [("x|y", None), (1, 0.12345)]) == (
        "| a | b |\n| --- | --- |\n| x\\|y | - |\n| 1 | 0.123 |\n"
    )


def test_a_table_takes_the_place_of_the_one_of_its_name(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("top\n<!-- one -->\nold\n<!-- end -->\nmiddle\n<!-- two -->\nkept\n<!-- end -->\n")
    pages.put("one", "new\n", page)
    want = "top\n<!-- one -->\nnew\n<!-- end -->\nmiddle\n<!-- two -->\nkept\n<!-- end -->\n"
    assert page.read_text() == want
    pages.put("one", "new\n", page)
    assert page.read_text() == want
    with pytest.raises(base.InputError, match="page.md has no place for the table: lines '<!-- three -->'"):
        pages.put("three", "new\n", page)
    assert page.read_text() == want


def test_the_readme_holds_the_tables_of_the_results():
    text = (ROOT / "README.md").read_text()
    for file in sorted((ROOT / "experiments" / "results").glob("ablate_*.md")):
        _, found, rest = text.partition(f"<!-- {file.stem} -->\n")
        assert found and rest.partition(pages.END)[0] == file.read_text()
