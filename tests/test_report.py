"""The report: self-contained, escaped, honest about what is missing; colours even and monotone in the credit."""

import html.parser
import json
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, metrics, report
from rsi_jax.report import curves, heatmap, page, transcripts

EVIL = "<script>alert(1)</script>\"'&</details>"
NAN = math.nan


def trace(**changes):
    fields = dict(
        title="episode",
        tokens=["sys", "ask", "ok", "call", "search", "error", "call", "rg"],
        segments=[
            report.TraceSegment(0, 2, "prompt"),
            report.TraceSegment(2, 3, "action", -0.5, "stop"),
            report.TraceSegment(5, 1, "observation"),
            report.TraceSegment(6, 2, "action", 1.0, "length"),
        ],
        adv=[0, 0, 0.5, 0, -1.0, 0, 0.25, NAN],
        student_prob=[NAN, NAN, 0.5, 0.6, 0.7, NAN, 0.8, 0.9],
        teacher_prob=[NAN, NAN, NAN, NAN, 0.1, NAN, NAN, NAN],
        inserts=[report.TraceInsert(2, "use rg", "tool error", 2, 3), report.TraceInsert(6, "x", "loop", 6, 2, 0.0)],
        separator=" ",
    )
    return report.TraceTokens(**(fields | changes))


class Page(html.parser.HTMLParser):
    """Collects tags, the texts of scripts, and checks that tags nest."""

    VOID = {"meta", "link", "br", "img", "input", "line", "path", "circle", "hr"}

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.text = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def classes(self, tag):
        return [set((attrs.get("class") or "").split()) for name, attrs in self.tags if name == tag]


def write(folder, **changes):
    if "curves" not in changes:
        with metrics.Tracker(folder) as tracker:
            for step in range(60):
                value = NAN if step == 30 else step / 60
                tracker.log("rl", step, {"success_rate": value, "loss": 1 - step / 60, "grad_norm": 10.0 ** (step % 4)})
    text = report.write_report(folder, title="run", **changes).read_text(encoding="utf-8")
    return text, Page(text)


def full(folder, **changes):
    ledger = metrics.Ledger()
    ledger.add(generated=1000, trained=500, hint=50)
    ledger.drop("groups skipped: zero variance", 7)
    with ledger.phase("generate"):
        pass
    given = dict(
        intro="A run.",
        summary=[page.SummaryRow("success", 0.1, 0.8, "higher", (0.05, 0.15), (0.7, 0.9), 64, "held out")],
        transcripts=[trace()],
        pairs=[(trace(title="a"), trace(title="b"))],
        config={"credit": {"name": "grpo"}, "seed": 1},
        defaults={"credit": {"name": "rloo"}, "seed": 1},
        environment=report.environment(devices=["one device"]),
        ledger=ledger.state(),
    )
    return write(folder, **(given | changes))


def test_the_page_is_self_contained(tmp_path):
    text, parsed = full(tmp_path)
    assert not re.search(r"""(src|href|action|data|url)\s*[=(]\s*["']?\s*(https?:)?//""", text)
    assert not re.search(r"@import|<link|<img|<iframe|<object|fetch\(|XMLHttp|import\(", text)
    assert all(value.startswith("#") for _, attrs in parsed.tags for name, value in attrs.items() if name == "href")
    assert any("default-src 'none'" in attrs.get("content", "") for _, attrs in parsed.tags)
    assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on")]
    assert list(tmp_path.glob("*.new")) == []


def test_everything_given_is_on_the_page(tmp_path):
    text, parsed = full(tmp_path)
    shown = " ".join(" ".join(parsed.text).split())
    for piece in (
        "0.8",
        "held out",
        "n = 64",
        "better",
        "success_rate",
        "grad_norm",
        "log scale",
        "use rg",
        "gated off",
    ):
        assert piece in shown
    for piece in ("tool error", "turn 2", "cut at length", "reward +0.5", '"grpo"', 'default "rloo"', "1 differ"):
        assert piece in shown
    for piece in ("one device", "zero variance 7", "jax", "× 1 not finite", "credit is not finite 3"):
        assert piece in shown
    assert "hints on this page that were gated off 3" in shown
    assert {"prompt", "action", "observation"} <= set().union(*parsed.classes("div"))


def test_untrusted_text_is_escaped_everywhere(tmp_path):
    evil = trace(
        title=EVIL,
        tokens=[EVIL] * 8,
        inserts=[report.TraceInsert(2, EVIL, EVIL, 2, 3, 1.0, EVIL)],
        segments=[report.TraceSegment(0, 4, "prompt", label=EVIL), report.TraceSegment(4, 4, "action", label=EVIL)],
        separator="<b>",
        meta={EVIL: EVIL},
    )
    text, parsed = full(
        tmp_path,
        intro=EVIL,
        summary=[page.SummaryRow(EVIL, 0, 1, note=EVIL)],
        curves=[report.Series(EVIL, EVIL, [0, 1], [0.0, 1.0])],
        transcripts=[evil],
        pairs=[(evil, evil)],
        config={EVIL: {EVIL: EVIL}},
        defaults={EVIL: {EVIL: ""}},
        environment={"revision": EVIL, "packages": {EVIL: EVIL}, "devices": [EVIL], "command": EVIL},
        ledger={"tokens": {EVIL: 1}, "seconds": {EVIL: 1.0}, "dropped": {EVIL: 1}},
    )
    assert "alert(1)</script>" not in text and "<script>alert" not in text and "<b><" not in text
    plain, _ = full(tmp_path / "plain", curves=[report.Series("a", "b", [0, 1], [0.0, 1.0])])
    assert text.count("<script") == plain.count("<script")
    assert text.count("</script") == plain.count("</script")
    assert sum(EVIL in piece for piece in parsed.text) > 10


def test_only_sampled_tokens_are_coloured_and_by_their_sign(tmp_path):
    _, parsed = write(tmp_path, curves=[], transcripts=[trace()])
    tokens = [names for names in parsed.classes("span") if "t" in names][1:]  # the first one is in the legend
    assert tokens == [{"t", "p", "h"}, {"t", "h"}, {"t", "n", "h"}, {"t", "p", "g"}, {"t", "x", "g"}]
    opacity = [attrs["style"] for name, attrs in parsed.tags if name == "span" and "style" in attrs]
    scale = heatmap.credit_scale([trace()])
    assert opacity == [f"--a:{heatmap.strength(value, scale):.3g}" for value in (0.5, -1.0, 0.25)]


def test_hover_data_has_one_entry_per_sampled_token(tmp_path):
    text, _ = write(tmp_path, curves=[], transcripts=[trace()])
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', text)[1])
    assert data["pos"] == [2, 3, 4, 6, 7]
    assert [data["labels"][row] for row in data["row"]] == ["turn 1"] * 3 + ["turn 2"] * 2
    assert data["adv"] == [0.5, 0, -1.0, 0.25, None]
    assert data["teacher"] == [None, None, 0.1, None, None]
    assert data["entropy"] == []


@hypothesis.given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_colour_is_even_monotone_and_bounded(credit, more, scale):
    opacity = heatmap.strength(credit, scale)
    assert opacity == heatmap.strength(-credit, scale)
    assert 0 <= opacity <= heatmap.strength(abs(credit) + more, scale) <= 1
    assert heatmap.strength(0.0, scale) == 0 and heatmap.strength(scale, scale) == 1
    assert heatmap.strength(NAN, scale) == heatmap.strength(math.inf, scale) == 0


def test_the_scale_ignores_zeros_and_what_is_not_finite():
    assert heatmap.credit_scale([trace(adv=[0, 0, 2.0, 0, -2.0, 0, NAN, math.inf])]) == 2.0
    assert heatmap.credit_scale([trace(adv=[0.0] * 8)]) == heatmap.credit_scale([]) == 1.0


def test_characters_that_deceive_are_shown_as_escapes():
    assert heatmap.visible("a\u202eb\x1b\x00") == "a\\u202eb\\x1b\\x00"
    assert heatmap.visible("") == "∅"
    assert heatmap.visible("a\n\tb", newline="↵\n") == "a↵\n\tb"
    assert heatmap.visible("héllo 漢字 🙂") == "héllo 漢字 🙂"


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(adv=[0.0]), "adv has 1 entries, tokens 8"),
        (dict(segments=[report.TraceSegment(0, 9, "action")]), "segment 0"),
        (dict(segments=[report.TraceSegment(0, 3, "action"), report.TraceSegment(2, 1, "prompt")]), "segment 1"),
        (dict(segments=[report.TraceSegment(0, 3, "tool")]), "segment 0"),
        (dict(inserts=[report.TraceInsert(9, "x")]), "insert 0"),
        (dict(inserts=[report.TraceInsert(0, "x", "", 7, 2)]), "insert 0"),
    ],
)
def test_a_trace_that_does_not_fit_names_what(changes, match):
    with pytest.raises(ValueError, match=match):
        trace(**changes)


@pytest.mark.parametrize("index", range(9))
def test_every_token_and_hint_is_shown_once_wherever_the_hint_stands(index):
    one = trace(inserts=[report.TraceInsert(index, "x")], segments=[report.TraceSegment(1, 4, "action")], separator="")
    rows = transcripts.view(one, "t", 1.0)["rows"]
    pieces = [piece for row in rows for piece in row["pieces"]]
    assert sum("insert" in piece for piece in pieces) == 1
    texts = [re.sub("<.*?>", "", str(piece["html"])) for piece in pieces if "html" in piece]
    place = next(i for i, piece in enumerate(pieces) if "insert" in piece)
    before = "".join(texts[:place])
    assert "".join(texts) == "".join(one.tokens) and before == "".join(one.tokens[:index])


def test_long_masked_text_folds_and_loses_nothing():
    tokens = [f"w{i}" for i in range(2000)]
    one = report.TraceTokens("t", tokens, [report.TraceSegment(0, 2000, "observation")], [], separator=" ")
    text = str(heatmap.span_html(one, 0, 2000, "observation", 1.0))
    assert re.findall(r"w\d+", text) == tokens and "<details" in text
    assert transcripts.view(one, "t", 1.0)["open"] is False
    lone = report.TraceTokens("t", ["x" * 5000], [report.TraceSegment(0, 1, "observation")], [])
    assert str(heatmap.span_html(lone, 0, 1, "observation", 1.0)).count("x" * 5000) == 1


@pytest.mark.parametrize("count", [0, 1, 7, 240, 241, 5000])
def test_the_strip_covers_the_rollout_and_keeps_its_peak(count):
    adv = [0.0] * count
    if count:
        adv[count // 2] = -3.0
    one = report.TraceTokens("t", ["x"] * count, [report.TraceSegment(0, count, "action")], adv)
    runs = heatmap.strip(one, 3.0)
    assert sum(run["width"] for run in runs) == pytest.approx(100)
    assert [run["a"] for run in runs if run["sign"] == "n"] == ([1.0] if count else [])


def test_trace_reads_a_row_of_a_rollout():
    T, U = 8, 3
    zeros = dict(discount_BS=jnp.ones((2, 4)), anchor_BS=jnp.zeros((2, 4), int), parent_BS=jnp.zeros((2, 4), int))
    segments = base.Segments(
        start_BS=jnp.array([[0, 0, 0, 0], [0, 2, 5, 0]]),
        length_BS=jnp.array([[0, 0, 0, 0], [2, 3, 1, 0]]),
        kind_BS=jnp.array([[0, 0, 0, 0], [base.PROMPT, base.ACTION, base.OBSERVATION, 0]]),
        reward_BS=jnp.array([[0, 0, 0, 0], [0, 1.5, 0, 9.0]]),
        finish_BS=jnp.array([[0, 0, 0, 0], [0, base.STOP, 0, 0]]),
        **zeros,
    )
    views = base.Views(
        rollout_K=jnp.array([0, 1, 1]),
        insert_at_K=jnp.array([0, 2, 0]),
        span_start_K=jnp.array([0, 3, 0]),
        span_length_K=jnp.array([0, 2, 0]),
        hint_KN=jnp.zeros((3, 1), int),
        hint_length_K=jnp.ones(3, int),
        source_K=jnp.array([-1, 1, -1]),
        weight_K=jnp.array([0, 0.5, 0]),
        polarity_K=jnp.ones(3),
    )
    logp = jnp.log(jnp.full((2, T), 0.5))
    rollout = base.Rollout(
        tokens_BT=jnp.zeros((2, T), int),
        logp_BT=logp,
        kept_mass_BT=jnp.ones((2, T)),
        group_B=jnp.zeros(2, int),
        segments=segments,
        weight_B=jnp.ones(2),
        chain_B=jnp.arange(2),
        views=views,
        view_logp_KU=jnp.log(jnp.full((3, U), 0.25)),
    )
    adv = jnp.arange(2 * T, dtype=jnp.float32).reshape(2, T)
    one = report.trace(rollout, 1, list("abcdef"), adv, title="t", hints={1: "try"}, sources=["x", "tool error"])
    assert one.kinds == ["prompt"] * 2 + ["action"] * 3 + ["observation"]
    assert one.adv == [8, 9, 10, 11, 12, 13]
    np.testing.assert_allclose(one.student_prob, [NAN, NAN, 0.5, 0.5, 0.5, NAN], rtol=1e-6)
    np.testing.assert_allclose(one.teacher_prob, [NAN, NAN, NAN, 0.25, 0.25, NAN], rtol=1e-6)
    assert one.inserts == [report.TraceInsert(2, "try", "tool error", 3, 2, 0.5)]
    assert (one.reward, one.segments[1].finish) == (1.5, "stop")


def test_series_keep_gaps_and_leave_the_clock_out():
    lines = [
        {"step": 0, "stage": "rl", "a": 1.0, "time/unix": 5.0, "ledger/generated": 3},
        {"step": 1, "stage": "rl", "a": None, "nonfinite": 1},
        {"step": 1, "stage": "eval", "a": 2.0},
    ]
    one, two = curves.from_lines(lines)
    assert (one.name, one.stage, one.steps) == ("a", "rl", [0, 1])
    assert math.isnan(one.values[1]) and two.values == [2.0]


def test_every_series_stands_in_exactly_one_chart():
    names = [
        "success",
        "loss",
        "policy_loss",
        "value_loss",
        "kl",
        "mystery",
        "grad_norm",
        "teacher_prob_right",
        "hint_gain",
    ]
    series = [report.Series(name, "rl", [0, 1], [1.0, 100.0**i]) for i, name in enumerate(names)]
    placed = [one.name for _, charts in curves.panels(series) for chart in charts for one in chart]
    assert sorted(placed) == sorted(names)
    titles = [title for title, _ in curves.panels(series)]
    assert titles.index("Loss terms") == titles.index("Probability of the right action") + 1
    assert titles[-1] == "Other"


@hypothesis.given(st.lists(st.floats(-1e12, 1e12) | st.just(NAN), min_size=1, max_size=60))
def test_charts_draw_any_values_inside_the_frame(values):
    made = curves.chart([report.Series("a", "rl", range(len(values)), values)], (0, len(values) - 1))
    numbers = [float(y) for d in re.findall(r'd="(.*?)"', made["svg"]) for y in re.findall(r" (-?[\d.]+)", d)]
    assert all(curves.TOP - 0.1 <= y <= curves.HEIGHT - curves.BOTTOM + 0.1 for y in numbers)
    assert "nan" not in made["svg"] and made["bad"] == sum(map(math.isnan, values))
    json.dumps(made["data"], allow_nan=False)


def test_thinning_keeps_the_mean_and_the_last_step():
    one = report.Series("a", "rl", range(4000), [float(i) for i in range(4000)])
    steps, values = curves.thin(one)
    assert len(steps) == curves.MAX_POINTS and steps[-1] == 3999
    assert np.mean(values) == pytest.approx(np.mean(one.values))


def test_flat_and_empty_runs_make_a_page(tmp_path):
    (tmp_path / metrics.METRICS_FILE).write_text('{"step": 5, "stage": "rl", "loss": 0}\n{"step"')
    path = report.write_report(tmp_path, title="")
    assert "half-written metric lines" in path.read_text()
    Page(path.read_text())
    Page(report.write_report(tmp_path, title="", curves=[]).read_text())
    with pytest.raises(base.InputError, match="does not exist"):
        report.write_report(tmp_path / "none", title="")


def test_a_headline_row_says_better_worse_or_overlap():
    row = page.SummaryRow
    assert page._summary(row("a", 0.1, 0.2))["verdict"] == "better"
    assert page._summary(row("a", 0.1, 0.2, "lower"))["verdict"] == "worse"
    assert page._summary(row("a", 0.1, 0.2, ""))["verdict"] == ""
    assert page._summary(row("a", 0.1, 0.2, "higher", (0.0, 0.2), (0.1, 0.3)))["overlap"]
    unknown = page._summary(row("a", None, 0.2))
    assert unknown["change"] is None and [dot["kind"] for dot in unknown["dots"]] == ["after"]


def test_environment_names_the_code_and_touches_no_device(tmp_path):
    found = report.environment(devices=["x"], packages=["numpy", "no-such-package"], root=tmp_path)
    assert found["packages"] == {"numpy": np.__version__, "no-such-package": "not installed"}
    assert (found["revision"], found["changed_files"], found["devices"]) == (None, None, ["x"])
    json.dumps(report.environment())
