"""The text maze of LMRL-Gym, fully and partially observed, with PPO.

python -m experiments.repro_maze
python -m experiments.repro_maze --quick

Source: Abdulhai et al. 2023 (https://arxiv.org/abs/2311.18232), table 2, GPT-2 small; scores are normalised to 0 for
the least return (-101), 50 for the mean of their data (-83), 100 for the best (-6.84 fully, -25.75 partially
observed):

    PPO 79.7 fully observed (mean return -37.7), 42.4 partially; behaviour cloning 58.2 and 53.1; GPT-4 78.2 and 60.4

Here: the same maze, rewards, 100 steps and scale of scores. What differs: a model from scratch (64 wide, 2 layers,
words of our own) that warms up on our own demonstrations, .98 of whose steps are random, so that they return -82.4 on
average (score 50.4; theirs -83). Fully observed it sees little more than the last description, as theirs does (a
window of 16 tokens); partially observed all of the episode. PPO with Muon, a critic that shares the trunk, GAE per
turn, rewards scaled by 1/20 for it, 16 episodes a batch. The budget is time on one core, over which the learning rate
decays. The table gives the mean return too.

What it can show: that PPO with a learned critic works here as well as published, and that the partially observed maze
is harder. It cannot show that our PPO is better: the published one had its own model, data and budget. The last line
of stdout is JSON: rows, claims, failed, results, figure (see experiments/repro.py).
"""

from experiments import cli, repro
from experiments.repro import Arm

STUDY = repro.Study(
    name="repro_maze",
    config="configs/maze.py",
    arms={
        "full": Arm(
            "PPO, fully observed",
            task=("env.maze.observed=full", "model.window=16"),
            panel="fully observed",
            published=79.7,
        ),
        "partial": Arm(
            "PPO, partially observed", task=("env.maze.observed=partial",), panel="partially observed", published=42.4
        ),
    },
    shared=(
        "env.maze.steps=100",
        "env.maze.wander=0.98",
        "rollout.capacity=1344",
        "lm.row_tokens=1344",
        "lm.updates=80",
        "lm.short_share=0.5",
        "credit.name=turn_gae",  # a model with a value head from the start
    ),
    rl=(
        "credit.turn_gae.lambda_=0.95",
        "credit.turn_gae.scale=std",
        "rl.updates=100000",
        "rl.max_minutes=5",
        "rl.schedule=cosine",
        "rl.groups=16",
        "rl.group_size=1",
        "rl.minibatches=4",
        "rl.optimizer=muon",
        "rl.lr=1e-3",
        "rl.value_clip=0.0",
        "rl.entropy_coef=0.01",
        "rl.reward_scale=0.05",
    ),
    quick=("rl.max_minutes=3",),
    quick_arms=("full",),
    metric="score",
    kept=("return", "success", "illegal"),
    curve="reward",
    seeds=3,
    quick_seeds=1,
    minutes=8,
)


_TOLD = {
    "source": "Abdulhai et al. 2023, table 2: PPO 79.7 fully, 42.4 partially observed",
    "minutes": 10,
    "budget": "5 minutes of PPO on one core (quick: 3)",
}
CLAIMS = (
    STUDY.claim(
        "full", "PPO scores the published 79.7 or more, fully observed", repro.value("full"), 79.7, "full", **_TOLD
    ),
    STUDY.claim("partial", "and 42.4 or more, partially observed", repro.value("partial"), 42.4, "partial", **_TOLD),
    STUDY.claim("order", "which is harder", repro.difference("full", "partial"), 0.0, "full", "partial", **_TOLD),
)

FLAGS = cli.Flags()
main = repro.Command(FLAGS, STUDY, CLAIMS).main

if __name__ == "__main__":
    cli.run(main, FLAGS)
