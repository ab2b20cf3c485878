"""The main job: a tiny model learns, from textual feedback, to recall which tools exist over a long session.

python -m experiments.train --config=configs/tool_calls.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.env.tool_calls.horizon = 192  # where the warmed-up model almost never succeeds without a hint
    c.model.head_size = 32  # 16 has too few slow rotary frequencies to find a list 900 tokens back (LOG.md)
    c.rollout.capacity = 960
    c.lm.update(updates=120, lr=5e-3, batch_rows=8, row_tokens=1216, short_horizon=3)
    c.rl.update(updates=30, groups=16, group_size=4, optimizer="muon", lr=4e-3, schedule="cosine")
    c.rl.feedback_clip = 0.1  # a few times the norm of the outcome gradient, which sharpens what feedback has taught
    c.credit.textual_feedback.inner = "grpo"
    c.feedback.update(per_rollout=4, off_at=0.9, fade=0.3)
    return c
