"""The text maze of LMRL-Gym, fully observed: a tiny model learns to walk from demonstrations that mostly wander.

python -m experiments.train --config=configs/maze.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.env.name = "maze"
    c.env.maze.update(steps=32, wander=0.8)
    c.rollout.update(capacity=544, slots=16)
    c.lm.update(updates=60, batch_rows=4, row_tokens=544)
    c.rl.update(updates=15, groups=2, group_size=8)
    c.credit.name = "gigpo"
    c.credit.gigpo.scale = "std"  # as the episode's own term
    c.feedback.rules = ()
    c.evaluation.update(every=0, final_episodes=128)
    return c
