"""The text maze of LMRL-Gym, fully observed: a tiny model learns to walk from demonstrations that mostly wander.

python -m experiments.train --config=configs/maze.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.env.name = "maze"
    c.env.maze.wander = 0.9  # such demonstrations return -64.13 in the mean
    c.rollout.update(capacity=1344, slots=32)
    c.lm.update(updates=60, batch_rows=8, row_tokens=1344)
    c.rl.update(updates=30, groups=4, group_size=8)
    c.credit.name = "gigpo"
    c.feedback.rules = ()
    c.evaluation.update(episodes=64, final_episodes=256)
    return c
