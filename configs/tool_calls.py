"""The main job: a tiny model learns, from textual feedback, to recall which tools exist over a long session.

python -m experiments.train --config=configs/tool_calls.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.env.tool_calls.horizon = 128  # where the warmed-up model almost never succeeds without a hint
    c.model.update(heads=2, kv_heads=2, head_size=32)  # 16: too few slow rotary frequencies to find a far list (LOG.md)
    c.rollout.capacity = 640
    c.lm.update(updates=120, lr=5e-3, batch_rows=12, row_tokens=832, short_horizon=3)
    c.rl.update(updates=50, groups=16, group_size=4, optimizer="muon", lr=4e-3, schedule="cosine")
    c.rl.feedback_clip = 0.1  # a few times the norm of the outcome gradient, which sharpens what feedback has taught
    c.credit.textual_feedback.inner = "grpo"
    c.feedback.update(per_rollout=4, off_at=0.9, fade=0.3)
    return c
