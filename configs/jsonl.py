"""Your own single-turn task: prompts in a JSONL file, the reward in a Python function, SmolLM2 as the policy.

python -m experiments.train --config=configs/jsonl.py --config.data.path=prompts.jsonl --config.reward=my_module:reward

A line is {"prompt": text} or {"messages": [...]}; its other fields go to reward(prompt, completion, **fields) -> float.
Textual feedback on top, here for long answers:
  --config.credit.name=textual_feedback --config.feedback.rules=long_answer
  --config.feedback.templates.long_answer="Answer in one short sentence."
"""

from configs import default


def get_config():
    c = default.get_config()
    c.stages = ("rl",)
    c.model.source = "smollm2"
    c.env.name = "jsonl"
    c.rollout.capacity, c.rollout.slots = 320, 8
    c.sample.max_tokens = 80
    c.rl.updates, c.rl.groups, c.rl.group_size, c.rl.micro_batch = 40, 4, 4, 8
    c.rl.lr = 1e-5
    c.credit.name = "grpo"
    c.feedback.rules = ()
    c.evaluation.episodes, c.evaluation.final_episodes = 32, 64
    return c
