"""What is expected of each credit variant: one row each, which `laws.py` measures and a test holds it to."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What is expected of one variant.

    breaks: the laws of `laws.LAWS` that it does not keep.
    inner: the variant that it is held with, where it wraps one.
    neutral, limit, limit_knobs: with the knobs `neutral` it is the variant `limit` ('inner' = what it wraps) with
      limit_knobs, where one reward comes at the end; '' = its limits need other columns rather than other knobs.
    """

    breaks: tuple[str, ...]
    inner: str = ""
    neutral: Mapping[str, Any] = {}
    limit: str = ""
    limit_knobs: Mapping[str, Any] = {}


# A return as it is, against the past or against a value: a constant counts, and one rollout is enough to learn from.
ABSOLUTE = ("shift", "silent", "alone")
# One number for the whole rollout: turns are not told apart, and nothing sums to the return.
WHOLE = ("causal", "conserves")

ROWS: dict[str, Row] = {
    "reinforce": Row((*ABSOLUTE, *WHOLE), neutral={"baseline": "batch"}, limit="rae", limit_knobs={"decay": 0.0}),
    "rae": Row(
        (*ABSOLUTE, *WHOLE, "split"), neutral={"decay": 0.0}, limit="reinforce", limit_knobs={"baseline": "batch"}
    ),
    "rloo": Row(WHOLE),
    "grpo": Row(WHOLE, neutral={"scale": "none"}, limit="dr_grpo"),
    "dr_grpo": Row(WHOLE),
    "maxrl": Row((*WHOLE, "shift")),
    "opo": Row(WHOLE),
    "otb": Row((*WHOLE, "shift")),
    "reinforce_pp": Row((*WHOLE, "silent", "alone", "split")),
    "reinforce_pp_baseline": Row((*WHOLE, "split")),
    "centred_return_to_go": Row(WHOLE, limit="dr_grpo"),
    "turn_rloo": Row(("conserves", "shift")),
    "mt_grpo": Row((*WHOLE, "silent"), neutral={"turn_weight": 0.0}, limit="grpo"),
    "prm": Row((*WHOLE, "silent", "alone", "sign"), inner="grpo", neutral={"weight": 0.0}, limit="inner"),
    "pbrs": Row((*WHOLE, "silent", "sign"), inner="centred_return_to_go", neutral={"weight": 0.0}, limit="inner"),
    "igpo": Row((*WHOLE, "silent", "alone"), neutral={"weight": 0.0}, limit="grpo"),
    "gigpo": Row((*ABSOLUTE, *WHOLE, "sign"), inner="grpo", neutral={"omega": 0.0}, limit="inner"),
    "gae": Row((*ABSOLUTE, "conserves"), neutral={"lambda_": 1.0}, limit="vapo", limit_knobs={"alpha": 1e9}),
    "vapo": Row((*ABSOLUTE, "conserves"), neutral={"alpha": 1e9}, limit="gae", limit_knobs={"lambda_": 1.0}),
    "turn_gae": Row((*ABSOLUTE, "conserves")),
    "vineppo": Row((*ABSOLUTE, "causal")),  # where only some turns are valued
    "spo": Row((*ABSOLUTE, "causal", "conserves"), neutral={"prob_max": 1.0}, limit="vineppo"),
    "tree_grpo": Row(WHOLE, limit="grpo"),
    "hcapo": Row((*ABSOLUTE, *WHOLE, "sign"), inner="grpo", neutral={"omega": 0.0}, limit="inner"),
    "hca": Row((*ABSOLUTE, "conserves"), limit="cocoa"),
    "cocoa": Row((*ABSOLUTE, "conserves"), limit="hca"),
    "textual_feedback": Row((*WHOLE, "split"), inner="grpo", neutral={"weight": 0.0}, limit="inner"),
    "sdpo": Row(
        ("conserves", "split", "unhinted"),
        inner="grpo",
        neutral={"weight": 0.0, "outcome_weight": 1.0},
        limit="inner",
    ),
    "locator_penalty": Row(
        (*WHOLE, "silent", "alone", "sign"), inner="grpo", neutral={"penalty": 0.0}, limit="inner"
    ),
    "rlsd": Row(WHOLE, inner="grpo", neutral={"mix": 0.0}, limit="inner"),
    "opd": Row((*WHOLE, "silent", "alone", "sign"), inner="grpo", neutral={"weight": 0.0}, limit="inner"),
    "vopd": Row((*WHOLE, "silent", "alone", "sign"), inner="grpo", neutral={"weight": 0.0}, limit="inner"),
    "agent_opsd": Row((*WHOLE, "shift"), inner="grpo", neutral={"mix": 0.0}, limit="inner"),
    "rlcsd": Row(WHOLE, inner="grpo", neutral={"mix": 0.0}, limit="inner"),
}  # fmt: skip
