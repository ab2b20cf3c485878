"""What `experiments.ablate_feedback` varies: one factor at a time around the default, as config overrides."""

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
    "baseline": {DEFAULT: (), "grpo": ("credit.name=grpo",)},
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

# Updates of the warm-up, each with and without feedback: how much depends on how well the model uses a hint.
WARM_UPS = (30, 60, 240)


def settings() -> dict[str, tuple[str, tuple[str, ...], int]]:
    """Every arm by name: (factor, overrides, updates of its warm-up; 0 = the default's)."""
    found = {name: (factor, knobs, 0) for factor, arms in FACTORS.items() for name, knobs in arms.items()}
    for updates in WARM_UPS:
        for name in (DEFAULT, "grpo"):
            found[f"{name}_after_{updates}"] = ("warm-up", FACTORS["baseline"][name], updates)
    return found
