"""The main job: a tiny model learns, from textual feedback, to recall which tools exist over a long session.

python -m experiments.train --config=configs/tool_calls.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.env.tool_calls.horizon = 128  # where the warmed-up model almost never succeeds without a hint
    c.rollout.capacity = 640
    c.lm.update(updates=120, lr=5e-3, batch_rows=12, row_tokens=832, short_horizon=3)
    c.rl.update(updates=45, groups=16, group_size=4, optimizer="muon", lr=4e-3, schedule="cosine")
    c.credit.textual_feedback.inner = "grpo"
    c.feedback.per_rollout = 6
    return c
