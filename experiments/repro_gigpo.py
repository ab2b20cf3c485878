"""Does credit by recurring states help? GiGPO against GRPO where an episode comes back to the same places.

python -m experiments.repro_gigpo
python -m experiments.repro_gigpo --quick

Source: Feng et al. 2025 (https://arxiv.org/abs/2505.10978), table 1: on ALFWorld a model of 1.5B reaches 86.7 with
GiGPO and 72.8 with GRPO, one of 7B 90.8 and 77.6. Here: the fully observed maze of LMRL-Gym, 32 steps, the anchor of a
turn is the cell, so that states recur within an episode and between the 8 episodes of a group, which share their
start. A tiny model (64 wide, 2 layers, a window of 16 tokens) warms up on demonstrations of which .8 of the steps are
random. Arms differ in credit alone; updates, rollouts, rate (Muon 1e-3, at which GRPO learns well; AdamW 2e-3
destroyed it) and entropy term are the same. 20 updates are in the middle of the curve, before either has solved the
maze:

    grpo       one advantage per episode
    turn_rloo  returns to go against the mean of the group's other episodes at any turn: steps, but no states
    gigpo      the episode's advantage and, with weight 1, that of the step within (group, state)

What differs from the paper: the task, a model from scratch, 5 seeds, no invalid-action penalty of its own. Equal
updates are nearly equal tokens; success at equal tokens stands in the table too. The last line of stdout is JSON:
rows, claims, failed, results, figure (see experiments/repro.py).
"""

from experiments import cli, repro
from experiments.repro import Arm

STUDY = repro.Study(
    name="repro_gigpo",
    config="configs/maze.py",
    arms={
        "grpo": Arm("GRPO", ("credit.name=grpo",)),
        "turn_rloo": Arm("returns to go, no states", ("credit.name=turn_rloo",)),
        "gigpo": Arm("GiGPO", ("credit.name=gigpo",)),
    },
    shared=("model.window=16", "lm.updates=80"),
    rl=(
        "rl.updates=20",
        "rl.groups=4",
        "rl.group_size=8",
        "rl.optimizer=muon",
        "rl.lr=1e-3",
        "rl.entropy_coef=0.01",
    ),
    quick=(),
    quick_arms=("grpo", "gigpo"),
    metric="return",
    kept=("success", "turns", "shortest"),
    curve="reward",
    seeds=5,
    quick_seeds=3,
    minutes=2,
)


def _claim(name: str, text: str, right: str):
    told = {"source": "Feng et al. 2025, table 1: 86.7 against 72.8 on ALFWorld (1.5B)", "minutes": 8}
    read = repro.difference("gigpo", right)
    return STUDY.claim(name, text, read, 0.0, "gigpo", right, **told, budget="20 updates of 32 episodes")


CLAIMS = (
    _claim("grpo", "return of GiGPO above that of GRPO after as many updates", "grpo"),
    _claim("turn_rloo", "and above that of returns to go without states", "turn_rloo"),
)

FLAGS = cli.Flags()
main = repro.Command(FLAGS, STUDY, CLAIMS).main

if __name__ == "__main__":
    cli.run(main, FLAGS)
