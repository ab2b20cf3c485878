"""What `experiments.ablate_feedback` varies: one factor at a time around the default, as config overrides."""

import dataclasses
from collections.abc import Mapping

CONFIG = "configs/tool_calls.py"
DEFAULT = "default"


def _pull(**knobs: object) -> tuple[str, ...]:
    return tuple(f"credit.textual_feedback.{name}={value}" for name, value in knobs.items())


def _said(**knobs: object) -> tuple[str, ...]:
    return tuple(f"feedback.{name}={value}" for name, value in knobs.items())


# Factor -> setting -> overrides. The default is textual_feedback as configs/tool_calls.py has it: forward KL over the
# whole vocabulary, a frozen teacher, hints from templates at the located turns, faded out as success rises.
FACTORS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "baseline": {DEFAULT: (), "grpo": ("credit.name=grpo", "rl.lr=1e-3"), "penalty": ("credit.name=locator_penalty",)},
    "divergence": {
        "reverse_kl": _pull(divergence="reverse_kl"),
        "jsd_.1": _pull(divergence="jsd", alpha=0.1),
        "jsd_.5": _pull(divergence="jsd", alpha=0.5),
        "jsd_.9": _pull(divergence="jsd", alpha=0.9),
        "sampled": _pull(divergence="sampled"),
    },
    "support": {"top_1": _pull(top_k=1), "top_4": _pull(top_k=4), "top_16": _pull(top_k=16)},
    "clip": {"token_clip_1": _pull(clip=1.0), "entry_clip_.1": _pull(entry_clip=0.1)},
    "teacher": {
        "live": _said(teacher="live"),
        "ema_.01": _said(teacher="ema", teacher_rate=0.01),
        "ema_.05": _said(teacher="ema", teacher_rate=0.05),
        "ema_.2": _said(teacher="ema", teacher_rate=0.2),
        "snapshot_10": _said(teacher="snapshot", teacher_every=10),
    },
    "insertion": {"first_turn": _said(insert="first", branch_tokens=0)},
    "hint": {"oracle": _said(hint="oracle")},
    "hints per rollout": {"1_hint": _said(per_rollout=1), "16_hints": _said(per_rollout=16, branch_tokens=0)},
    "gate": {"failed_only": _pull(failed_only=True), "gain_gate_.1": _said(min_gain=0.1)},
    "schedule": {"never_off": _said(off_at=2.0), "decay_60": _said(decay=60), "warmup_10": _said(warmup=10)},
    # A clip of 0 is none; one of 1e-6 leaves the outcome's gradient no say.
    "use": {"rlsd": ("credit.name=rlsd",), "feedback_alone": ("rl.outcome_clip=1e-6",)},
    "control": {
        "empty": _said(hint="empty"),
        "irrelevant": _said(hint="irrelevant"),
        "shuffled": _said(hint="shuffled"),
        "wrong": _said(hint="wrong"),
        "other_turn": _said(turn="other"),
        "ema_irrelevant": _said(hint="irrelevant", teacher="ema"),
    },
}

# Factors that change what all start from, setting -> overrides of warm-up and RL, and the arms that run with each.
# Updates of the warm-up: how well the model uses a hint. Names of a purpose: how much is known once a call was wrong.
TASKS: Mapping[str, tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]] = {
    "warm-up": ({f"after_{n}": (f"lm.updates={n}",) for n in (30, 60, 240)}, (DEFAULT, "grpo")),
    "names": ({"of_16_names": ("env.tool_calls.names=16",)}, (DEFAULT, "grpo", "penalty")),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """An arm. overrides: of its RL. task: of its warm-up too."""

    factor: str
    overrides: tuple[str, ...]
    task: tuple[str, ...] = ()


def settings() -> dict[str, Setting]:
    """Every arm by name, those of the baseline first."""
    found = {name: Setting(factor, knobs) for factor, arms in FACTORS.items() for name, knobs in arms.items()}
    for factor, (tasks, arms) in TASKS.items():
        for ending, task in tasks.items():
            found |= {f"{name}_{ending}": Setting(factor, FACTORS["baseline"][name], task) for name in arms}
    return found
