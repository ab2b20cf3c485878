"""From transcripts to views on the host: where rules point, what writers say, and that no word of a hint is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import base, feedback
from rsi_jax.credit import examples
from rsi_jax.feedback import hints, locate, views
from tests import tiny

TEMPLATES = hints.Templates(
    by_rule={"failed_tool_call": "reminder {tools}", "malformed_call": "reminder", "long_answer": ""},
    wrong={"failed_tool_call": "reminder {wrong_tools}"},
    oracle="reminder {right}",
    irrelevant="weather lunch news",
)
LISTINGS = ("tools search rg edit vim", "tools list ls test tox", "tools edit sed")
RULES = ("failed_tool_call", "malformed_call")


def message(content, role="user"):
    return base.Message(role=role, content=content)


def transcript(row, *turns):
    """One turn a pair (what is said, what comes back); turns of 2 tokens that stand behind 3 shown ones."""
    made, place = base.Transcript(row, row), 0
    shown = [message(LISTINGS[row % len(LISTINGS)], "system"), message("start lunch")]
    for i, (said, answer) in enumerate(turns):
        reply = [message(answer)]
        made.turns.append(
            base.TurnRecord(
                shown, said, place + 3, 2, place + 1, base.STOP, reply, 0.0, {"right": f"rg{i}", "result": "found"}
            )
        )
        shown, place = reply, place + 5
    return made


BATCH = [
    transcript(0, ("grep", "tool not found search"), ("ok", "malformed call search"), ("rg", "done lunch")),
    transcript(1, ("ok", "noted list"), ("ls", "Tool Not Found test"), ("ls", "tool not found list")),
    transcript(2, ("ok", "noted edit"), ("sed", "done lunch")),
]


def found(batch=BATCH, rules=RULES, per_rollout=4, **knobs):
    return locate.locate(batch, locate.find(rules), per_rollout=per_rollout, seed="s", **knobs)


# --- where -----------------------------------------------------------------------------------------------------------


def test_rules_read_what_came_back_and_name_a_turn_once():
    findings, left_out = found()
    assert findings == [
        locate.Finding(0, 0, "failed_tool_call"),
        locate.Finding(0, 1, "malformed_call"),
        locate.Finding(1, 1, "failed_tool_call"),  # its repeat in the next turn copies the fault: not a new one
    ]
    assert left_out == 0
    both = [transcript(0, ("grep", "tool not found, malformed call"))]
    assert found(both)[0] == [locate.Finding(0, 0, "failed_tool_call")]  # the first rule that fires
    assert found(both, RULES[::-1])[0] == [locate.Finding(0, 0, "malformed_call")]
    for answer in ("tools not found", "not a tool", "toolnot found", "malformed caller"):
        assert found([transcript(0, ("grep", answer))]) == ([], 0)


def test_no_rule_reads_what_only_the_environment_knows():
    for rule in locate.RULES.values():
        before = [rule(t, i) for t in BATCH for i in range(len(t.turns))]
        for t in BATCH:
            for turn in t.turns:
                turn.info = {}
        assert before == [rule(t, i) for t in BATCH for i in range(len(t.turns))]
        for t in BATCH:
            for i, turn in enumerate(t.turns):
                turn.info = {"right": f"rg{i}", "result": "found"}


def test_long_answers_run_over_their_words_or_their_budget():
    rule = locate.find(["long_answer"], {"long_answer": {"max_words": 3}})["long_answer"]
    made = transcript(0, ("one two three", ""), ("one two three four", ""), ("one", ""))
    assert [rule(made, i) for i in range(3)] == [False, True, False]
    made.turns[2].finish = base.LENGTH
    assert rule(made, 2)


@pytest.mark.parametrize("pick", ["first", "random"])
def test_more_faults_than_views_are_counted(pick):
    many = [transcript(0, *[(f"call{i}", "tool not found x") for i in range(6)]), BATCH[1]]
    findings, left_out = found(many, per_rollout=2, pick=pick)
    assert left_out == 4 and [f.row for f in findings] == [0, 0, 1]
    turns = [f.turn for f in findings[:2]]
    assert turns == sorted(turns) and (turns == [0, 1] or pick == "random")
    assert (findings, left_out) == found(many, per_rollout=2, pick=pick)


def test_an_unknown_rule_is_named_with_the_nearest():
    with pytest.raises(base.InputError, match="'failed_tool_cal', which is no rule .*did you mean 'failed_tool_call'"):
        locate.find(["failed_tool_cal"])


# --- what ------------------------------------------------------------------------------------------------------------


def write(name, findings=None, **knobs):
    knobs = {"templates": TEMPLATES, "seed": "s"} | knobs
    return hints.write(name, found()[0] if findings is None else findings, BATCH, knobs.pop("templates"), **knobs)


def test_writers_say_what_they_are_for():
    assert write("template") == ["reminder tools search rg edit vim", "reminder", "reminder tools list ls test tox"]
    assert write("empty") == ["", "", ""]
    assert write("oracle") == ["reminder rg0", "reminder rg1", "reminder rg1"]
    policy = write(
        "policy", policy=lambda findings, batch: [f"{batch[f.row].seed} {f.turn} {f.rule}" for f in findings]
    )
    assert policy == ["0 0 failed_tool_call", "0 1 malformed_call", "1 1 failed_tool_call"]
    first = [found()[0][0]]
    # Row 2 has another editor; no row another searcher, so that gets the name of the next purpose.
    assert write("wrong", first) == ["reminder tools search vim edit sed"]
    for name in (*hints.WRITERS, "policy"):
        assert write(name, [], policy=lambda *_: 1 / 0) == []


def test_a_listing_is_the_one_in_force_at_the_turn():
    made = transcript(0, ("rg", "renamed search ag\ndone edit"), ("vim", "renamed the file foo"), ("rg", "not found"))
    for turn, want in enumerate(("search rg edit vim", "search ag edit vim", "search ag edit vim")):
        finding = [locate.Finding(0, turn, "failed_tool_call")]
        assert hints.write("template", finding, [made], TEMPLATES, seed="s") == [f"reminder tools {want}"]
    # The old name of what was renamed is a wrong one.
    assert hints.write("wrong", finding, [made], TEMPLATES, seed="s") == ["reminder tools search rg edit ag"]


def test_wrong_hints_name_no_tool_that_is_right_where_other_rollouts_list_others():
    names = {p: [f"{p}{i}" for i in range(4)] for p in ("search", "edit", "list")}
    batch = [transcript(0, ("x", "tool not found")) for _ in range(4)]
    for i, one in enumerate(batch):
        line = " ".join(["tools", *(f"{p} {names[p][(i + j) % 4]}" for j, p in enumerate(names))])
        one.turns[0].shown = [message(line, "system")]
    findings = [locate.Finding(row, 0, "failed_tool_call") for row in range(4)]
    for made, right in zip(
        *(hints.write(n, findings, batch, TEMPLATES, seed="s") for n in ("wrong", "template")), strict=True
    ):
        assert made.split()[::2][1:] == right.split()[::2][1:] and not set(made.split()[3::2]) & set(
            right.split()[3::2]
        )


def test_irrelevant_words_are_as_many_as_the_hint_has():
    texts = write("irrelevant")
    assert [len(text.split()) for text in texts] == [len(text.split()) for text in write("template")] == [6, 1, 6]
    assert {word for text in texts for word in text.split()} <= set(TEMPLATES.irrelevant.split())


@settings(max_examples=20)
@given(seed=st.text(max_size=5))
def test_shuffled_hints_come_from_another_rollout(seed):
    texts = write("template")
    for finding, text in zip(found()[0], write("shuffled", seed=seed), strict=True):
        others = [t for other, t in zip(found()[0], texts, strict=True) if other.row != finding.row]
        assert text in others
    assert write("shuffled", seed=seed) == write("shuffled", seed=seed)
    assert write("shuffled", [found()[0][0]]) == [""]  # no other rollout has one


def replaced(**changes):
    fields = {name: getattr(TEMPLATES, name) for name in ("by_rule", "wrong", "oracle", "irrelevant")}
    return hints.Templates(**(fields | changes))


@pytest.mark.parametrize(
    ("name", "templates", "says"),
    [
        ("kind", TEMPLATES, "feedback.hint='kind' is no hint writer .known: template, empty"),
        ("policy", TEMPLATES, "needs a callable that writes hints"),
        ("wrong", TEMPLATES, "rule 'malformed_call' has no hint text"),
        ("template", replaced(by_rule={}), "rule 'failed_tool_call' has no hint text"),
        ("irrelevant", replaced(irrelevant=" "), "feedback.irrelevant is empty"),
        ("oracle", replaced(oracle="try {write}"), "write"),
        ("oracle", replaced(oracle="try {"), "oracle|template"),
    ],
)
def test_what_cannot_be_written_is_named(name, templates, says):
    with pytest.raises(base.InputError, match=says):
        write(name, templates=templates)


def test_a_prompt_without_a_listing_and_a_task_without_a_right_answer_are_named():
    bare = [transcript(0, ("grep", "tool not found"))]
    bare[0].turns[0].shown[0] = message("hello")
    bare[0].turns[0].info = {}
    findings = [locate.Finding(0, 0, "failed_tool_call")]
    with pytest.raises(base.InputError, match="no line of the prompt starts with 'tools'"):
        hints.write("template", findings, bare, TEMPLATES, seed="")
    with pytest.raises(base.InputError, match="right"):
        hints.write("oracle", findings, bare, TEMPLATES, seed="")


# --- views -----------------------------------------------------------------------------------------------------------


def add(hint="template", batch=BATCH, policy=None, **sizes):
    rows = [[examples.prompt(3), examples.action(2), examples.observation(3), examples.action(2)]] * len(batch)
    sizes = {"per_rollout": 2, "hint_tokens": 80, "branch_tokens": 168} | sizes
    writing = feedback.Writing(locate.find(RULES), hint, TEMPLATES, policy=policy, **sizes)
    return feedback.add(examples.rollout(rows, T=16), batch, tiny.CHAT, writing, seed="s")


def test_views_stand_where_the_findings_are():
    rollout, written, counts = add()
    v = rollout.views
    assert [f for f, _ in written] == found()[0] and v.rollout_K.tolist() == [0, 0, 1, 1, 2, 2]
    used = [0, 1, 2]
    for k, (finding, text) in zip(used, written, strict=True):
        turn = BATCH[finding.row].turns[finding.turn]
        place = (v.rollout_K[k], v.insert_at_K[k], v.span_start_K[k], v.span_length_K[k], v.source_K[k], v.weight_K[k])
        want = (finding.row, turn.insert_at, turn.start, turn.length, RULES.index(finding.rule), 1.0)
        assert place == want and v.polarity_K[k] == 1.0
        ids = v.hint_KN[k, : v.hint_length_K[k]].tolist()
        assert ids == tiny.CHAT.hint(text) and tiny.CHAT.tokenizer.decode(ids) == f"<hint> {text} </hint>"
    for name in ("span_length_K", "weight_K", "hint_length_K", "hint_KN"):
        assert not getattr(v, name)[3:].any()
    assert (v.source_K[3:] == -1).all()
    assert counts == {
        "feedback/located": 3.0, "feedback/left_out": 0.0, "feedback/empty_hints": 0.0, "feedback/hint_tokens": 19.0,
    }  # fmt: skip


def test_T37_an_empty_hint_makes_no_view_and_is_counted():
    rollout, written, counts = add("empty")
    assert len(written) == 3 and counts["feedback/empty_hints"] == 3.0 and counts["feedback/hint_tokens"] == 0.0
    assert not rollout.views.weight_K.any() and not rollout.views.span_length_K.any()


def test_T45_a_batch_without_faults_has_views_of_weight_zero():
    rollout, written, counts = add(batch=[BATCH[2]] * 3)
    assert written == [] and not any(counts.values())
    assert rollout.views.rollout_K.shape == (6,) and not rollout.views.weight_K.any()


@settings(max_examples=15)
@given(words=st.lists(st.integers(1, 70), min_size=3, max_size=3))
def test_T44_a_hint_is_never_cut(words):
    texts = iter(" ".join(["tools"] * n) for n in words)
    rollout, written, counts = add("policy", policy=lambda *_: list(texts))
    kept = rollout.views.hint_length_K.sum()
    assert kept == counts["feedback/hint_tokens"] == sum(n + 2 for n in words)


def test_T44_what_does_not_fit_is_refused():
    with pytest.raises(base.InputError, match="'failed_tool_call' has 8 tokens: raise feedback.hint_tokens=7"):
        add(hint_tokens=7)
    with pytest.raises(base.InputError, match="a rollout have 19 tokens: raise feedback.branch_tokens=18"):
        add(branch_tokens=18)
    add(hint_tokens=8, branch_tokens=19)
    findings, ids = found()[0], [[5] * 3] * 3
    with pytest.raises(ValueError, match="rollout 0 has more than 1 views"):
        views.build(findings, ids, BATCH, RULES, per_rollout=1, hint_capacity=8, branch=20)


def test_hints_may_stand_before_the_first_turn_of_the_row():
    at_turn, first = (add(insert=insert)[0].views for insert in ("turn", "first"))
    used = [k for k in range(6) if at_turn.span_length_K[k]]
    for k in used:
        turns = BATCH[at_turn.rollout_K[k]].turns
        assert first.insert_at_K[k] == turns[0].insert_at <= at_turn.insert_at_K[k]
    assert any(first.insert_at_K[k] < at_turn.insert_at_K[k] for k in used)
    same = ("span_start_K", "span_length_K", "hint_KN", "weight_K")
    assert all((getattr(first, name) == getattr(at_turn, name)).all() for name in same)
    assert views.extra_tokens(first) > views.extra_tokens(at_turn)


def test_the_control_of_where_puts_the_same_words_at_turns_without_a_fault():
    row = transcript(
        0, ("rg", "tool not found: rg"), ("vim", "malformed call: vim"), ("edit", "found"), ("tox", "found")
    )
    batch = [row, row, transcript(1, ("rg", "tool not found: rg"))]
    _, written, _ = add(batch=batch)
    rollout, moved, counts = add(batch=batch, turn="other")
    assert (
        len(written) == 5 and len(moved) == 4 and counts["feedback/left_out"] == 1 and counts["feedback/located"] == 5
    )
    for b in (0, 1):
        theirs = [(finding.turn, text) for finding, text in moved if finding.row == b]
        assert sorted(turn for turn, _ in theirs) == [2, 3]
        assert [text for _, text in theirs] == [text for finding, text in written if finding.row == b]
    assert moved == add(batch=batch, turn="other")[1]
    assert rollout.views.span_start_K[:2].tolist() == [row.turns[f.turn].start for f, _ in moved[:2]]
