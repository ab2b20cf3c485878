"""What to say: a short hint for each located turn.

A writer is a function (findings, transcripts, templates, ...) -> one text per finding. `template` is the method; the
others are controls that must not work as well:

  empty       no hint at all
  irrelevant  a sentence on another subject, as many words as the template's hint
  shuffled    the template's hint of another located rollout
  wrong       the template with the listed tools handed to the wrong purposes
  oracle      the right action itself, from the environment (an upper bound, not a method)

`policy`: a callable writes them; the policy itself (train/writer.py) unless another is passed to train.run.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from rsi_jax import base, chains
from rsi_jax.feedback.locate import Finding

# (findings, transcripts) -> a hint text per finding, '' = none: the policy, a judge, a person.
PolicyWriter = Callable[[Sequence[Finding], Sequence[base.Transcript]], list[str]]


@dataclasses.dataclass(frozen=True)
class Templates:
    """Texts by rule. Placeholders: {tools} the prompt's line that lists the tools, brought up to date by lines that
    start with 'renamed', {wrong_tools} the same with other names: for each purpose one that the prompt of a rollout of
    the batch lists for it and that is not in force here, or else the name of the next purpose (among rotated names a
    model that knows which go with a purpose finds the right one), {right} the right action as the environment knows it.

    irrelevant: words on another subject, repeated or cut to the length of the hint they stand for.
    """

    by_rule: Mapping[str, str]
    wrong: Mapping[str, str]
    oracle: str
    irrelevant: str


def fill(text: str, values: Mapping[str, str], what: str, known: Sequence[str]) -> str:
    """Fills placeholders in.

    Raises: base.InputError naming `what` does not fill in, and the placeholders that are known.
    """
    try:
        return text.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join(f"{{{name}}}" for name in known)
        raise base.InputError(f"{what} does not fill in ({error!r}); known: {names}") from error


def _listing(transcript: base.Transcript, turn: int) -> str:
    """The line of the prompt that starts with 'tools'; lines 'renamed PURPOSE NAME ...' shown since then update it."""
    listing = _prompt_listing(transcript)
    tools, later = dict(_pairs(listing)), transcript.turns[1 : turn + 1]
    for line in (line for record in later for line in _lines(record) if line.lower().startswith("renamed ")):
        tools |= {purpose: name for purpose, name in _pairs(line) if purpose in tools}
    return listing if tools == dict(_pairs(listing)) else _line(listing, tools)


def _lines(record: base.TurnRecord) -> list[str]:
    return [line for message in record.shown for line in message["content"].splitlines()]


def _prompt_listing(transcript: base.Transcript) -> str:
    listing = next((line for line in _lines(transcript.turns[0]) if line.lower().startswith("tools")), None)
    if listing is None:
        raise base.InputError(
            f"task {transcript.seed}: a hint wants {{tools}}, but no line of the prompt starts with 'tools'"
        )
    return listing


def _pairs(line: str) -> list[tuple[str, str]]:
    _, *words = line.split()
    return list(zip(words[::2], words[1::2], strict=False))


def _line(listing: str, tools: Mapping[str, str]) -> str:
    return " ".join([listing.split()[0], *(f"{purpose} {name}" for purpose, name in tools.items())])


def _misleading(listing: str, transcripts: Sequence[base.Transcript]) -> str:
    tools = dict(_pairs(listing))
    names = list(tools.values())
    wrong = dict(zip(tools, names[1:] + names[:1], strict=True))
    for other in transcripts:
        elsewhere = dict(_pairs(_prompt_listing(other)))
        wrong |= {p: name for p, name in elsewhere.items() if p in tools and wrong[p] in names and name not in names}
    return _line(listing, wrong)


def _fill(template: str, transcripts: Sequence[base.Transcript], finding: Finding) -> str:
    values, transcript, turn = {}, transcripts[finding.row], finding.turn
    if "{tools}" in template or "{wrong_tools}" in template:
        values["tools"] = _listing(transcript, turn)
    if "{wrong_tools}" in template:
        values["wrong_tools"] = _misleading(values["tools"], transcripts)
    if "{right}" in template:
        if "right" not in transcript.turns[turn].info:
            raise base.InputError(f"task {transcript.seed}: a hint wants {{right}}, but its environment names none")
        values["right"] = transcript.turns[turn].info["right"]
    return fill(template, values, f"hint template {template!r}", ("tools", "wrong_tools", "right"))


def _by_rule(texts: Mapping[str, str], finding: Finding, transcripts) -> str:
    if not texts.get(finding.rule):
        raise base.InputError(f"rule {finding.rule!r} has no hint text: set feedback.templates.{finding.rule}")
    return _fill(texts[finding.rule], transcripts, finding)


def template(findings, transcripts, templates: Templates, seed: str) -> list[str]:
    """Writes the rule's template: the method."""
    return [_by_rule(templates.by_rule, finding, transcripts) for finding in findings]


def empty(findings, transcripts, templates: Templates, seed: str) -> list[str]:
    """Writes nothing."""
    return ["" for _ in findings]


def irrelevant(findings, transcripts, templates: Templates, seed: str) -> list[str]:
    """Writes words on another subject, as many as the template's hint has."""
    words = templates.irrelevant.split()
    if not words:
        raise base.InputError("feedback.irrelevant is empty: the irrelevant-hint control needs a text")
    lengths = [len(text.split()) for text in template(findings, transcripts, templates, seed)]
    return [" ".join((words * (length // len(words) + 1))[:length]) for length in lengths]


def shuffled(findings, transcripts, templates: Templates, seed: str) -> list[str]:
    """Writes the hint of a located turn of another rollout (empty when only one rollout was located)."""
    rng, texts = random.Random(seed), template(findings, transcripts, templates, seed)
    others = [[j for j, other in enumerate(findings) if other.row != finding.row] for finding in findings]
    return [texts[rng.choice(choices)] if choices else "" for choices in others]


def wrong(findings, transcripts, templates: Templates, seed: str) -> list[str]:
    """Writes a hint that misleads."""
    return [_by_rule(templates.wrong, finding, transcripts) for finding in findings]


def oracle(findings, transcripts, templates: Templates, seed: str) -> list[str]:
    """Writes the right action itself."""
    return [_fill(templates.oracle, transcripts, finding) for finding in findings]


WRITERS = {writer.__name__: writer for writer in (template, empty, irrelevant, shuffled, wrong, oracle)}


def _in_episodes(findings: Sequence[Finding], transcripts: Sequence[base.Transcript]):
    """The findings as turns of episodes, and these: another row of one chain is the same rollout."""
    episode_of, place = chains.episode_of(transcripts), chains.turn_in_episode
    moved = [Finding(episode_of[f.row], place(transcripts, f.row, f.turn), f.rule) for f in findings]
    return moved, chains.episodes(transcripts)


def write(
    name: str,
    findings: Sequence[Finding],
    transcripts: Sequence[base.Transcript],
    templates: Templates,
    *,
    seed: str,
    policy: PolicyWriter | None = None,
) -> list[str]:
    """Writes one hint per finding with the writer of that name, who sees whole episodes where they are chains of rows.

    Raises: base.InputError for an unknown name, a missing template, or `policy` without a callable.
    """
    findings, transcripts = _in_episodes(findings, transcripts)
    if name == "policy":
        if policy is None:
            raise base.InputError("feedback.hint='policy' needs a callable that writes hints; pass it to train.run")
        return policy(findings, transcripts) if findings else []
    if name not in WRITERS:
        raise base.InputError(f"feedback.hint={name!r} is no hint writer (known: {', '.join([*WRITERS, 'policy'])})")
    return WRITERS[name](findings, transcripts, templates, seed)
