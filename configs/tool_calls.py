"""The main job: a tiny model learns, from textual feedback, to recall which tools exist over a long session.

python -m experiments.train --config=configs/tool_calls.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.env.tool_calls.horizon = 128
    c.lm.update(updates=60, lr=5e-3, batch_rows=16, row_tokens=640, short_horizon=3)
    c.rl.update(updates=30, lr=1e-3)
    c.rollout.capacity = 640
    return c
