"""A run of seconds through every kind of stage, for `experiments.resume_check`: warm-up, feedback, evaluation, archive.

python -m experiments.resume_check --config=configs/resume_check.py --kills=20
"""

from configs import tool_calls


def get_config():
    c = tool_calls.get_config()
    c.env.tool_calls.horizon = 12
    c.rollout.update(capacity=128, slots=8)
    c.lm.update(updates=8, batch_rows=4, row_tokens=256)
    c.rl.update(updates=8, groups=4, group_size=2, minibatches=2)
    c.feedback.update(per_rollout=2, teacher="ema")
    c.evaluation.update(episodes=8, final_episodes=16, every=3)
    c.checkpoint.every = 3
    c.archive.every = 2
    return c
