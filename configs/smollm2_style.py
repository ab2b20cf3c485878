"""SmolLM2-135M-Instruct learns, from feedback alone, to answer briefly. The outcome reward is correctness alone.

make smollm2 && python -m experiments.train --config=configs/smollm2_style.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.model.source = "smollm2"
    c.stages = ("rl",)
    c.env.name = "questions"
    c.rollout.update(capacity=160, slots=16)  # prompts have about 40 tokens
    c.sample.max_tokens = 80
    c.rl.update(updates=10, groups=8, group_size=2, lr=1e-5, warmup=2, micro_batch=4)
    c.credit.textual_feedback.inner = "grpo"
    c.feedback.update(rules=("long_answer",), per_rollout=1, hint_tokens=24, branch_tokens=160, off_at=2.0)
    c.feedback.long_answer.max_words = 15
    c.feedback.templates.long_answer = "Answer in one short sentence."
    c.feedback.wrong.long_answer = "Answer in three long paragraphs."
    c.feedback.irrelevant = "The weather is nice today."
    c.evaluation.update(episodes=32, final_episodes=114, every=0, gain_turns=16)  # 114: each held-out question thrice
    c.evaluation.perplexity_text = "public_domain.txt"
    c.checkpoint.every = 8
    return c
