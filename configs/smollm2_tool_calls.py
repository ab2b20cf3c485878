"""SmolLM2-135M-Instruct on the tool-call task, with tools that are renamed in the middle of the session.

make smollm2 && python -m experiments.train --config=configs/smollm2_tool_calls.py
"""

from configs import default


def get_config():
    c = default.get_config()
    c.model.source = "smollm2"
    c.env.tool_calls.update(horizon=16, goals=11, slack=2, listed=4, late=False, renamed=3, renamed_at=7)
    c.rollout.update(capacity=448, slots=8)
    c.sample.max_tokens = 6
    c.lm.update(updates=24, batch_rows=4, row_tokens=512, optimizer="adamw", lr=2e-4, warmup=3)
    c.lm.update(short_horizon=3, short_share=0.8, hinted_horizon=16)
    c.rl.update(updates=10, groups=4, group_size=2, lr=2e-5, warmup=2, micro_batch=4)
    c.credit.textual_feedback.inner = "grpo"
    c.feedback.update(per_rollout=4, hint_tokens=48, branch_tokens=384, off_at=2.0, watch_turns=4)
    c.evaluation.update(episodes=8, final_episodes=24, every=0, gain_turns=24)
    c.evaluation.perplexity_text = "public_domain.txt"
    c.checkpoint.every = 4
    return c
