"""The main job: a tiny model learns, from textual feedback, to recall which tools exist over a long session.

python -m experiments.train --config=configs/tool_calls.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.rollout.capacity = 480
    return c
