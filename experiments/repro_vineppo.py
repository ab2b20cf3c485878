"""Do more continuations make better credit? VinePPO's K, on a model.

python -m experiments.repro_vineppo
python -m experiments.repro_vineppo --quick

Source: Kazemnejad et al. 2024 (https://arxiv.org/abs/2410.01679), ablation of K: on MATH, Rho 1.1B reaches 19.9 / 21.2
/ 23.0 with K = 1 / 3 / 9 after as many steps; RLOO 17.3, GRPO 17.8. Here: the tool-call task at 16 turns, 4 sub-goals;
a tiny model warmed up for 60 updates, short of what the horizon experiment gives it; every second turn is valued by K
fresh continuations. Arms have the same rollouts, updates and learning rate; the continuations come on top, and are
counted: sampled tokens and seconds stand beside every number, and what all arms had reached when they had sampled as
many tokens as the cheapest in all.

What differs from the paper: the task, a model from scratch, Muon, no KL penalty, 5 seeds. In exact worlds the same
question has an exact answer: `experiments.credit_fidelity`. The last line of stdout is JSON: rows, claims, failed,
results, figure (see experiments/repro.py).
"""

from experiments import cli, horizon_arms, repro
from experiments.repro import Arm

KS = (1, 3, 9)


def _vine(k: int) -> Arm:
    return Arm(f"VinePPO, K = {k}", ("credit.name=vineppo", f"columns.continuations={k}", "columns.every=2"))


STUDY = repro.Study(
    name="repro_vineppo",
    config=horizon_arms.CONFIG,
    arms={"grpo": Arm("GRPO", ("credit.name=grpo",)), **{f"vineppo_{k}": _vine(k) for k in KS}},
    shared=(*horizon_arms.SIZES[16].overrides(16), "lm.updates=60"),
    rl=("rl.updates=20", "rl.lr=1e-3", "rl.schedule=constant"),
    quick=("rl.updates=8",),
    quick_arms=("vineppo_1", "vineppo_9"),
    metric="success",
    kept=("invalid", "filler_correct"),
    curve="train/success",
    seeds=5,
    quick_seeds=2,
    minutes=5,
)


def _claim(name: str, text: str, left: str, right: str, low: float):
    told = {"source": "Kazemnejad et al. 2024, ablation of K: 19.9 / 21.2 / 23.0 on MATH", "minutes": 8}
    read = repro.difference(left, right)
    return STUDY.claim(name, text, read, low, left, right, **told, budget="20 updates of 64 episodes")


CLAIMS = (
    _claim("9_1", "success with K = 9 above that with K = 1 after as many updates", "vineppo_9", "vineppo_1", 0.0),
    _claim("3_1", "with K = 3 not below K = 1 by more than .05", "vineppo_3", "vineppo_1", -0.05),
    _claim("9_3", "with K = 9 not below K = 3 by more than .05", "vineppo_9", "vineppo_3", -0.05),
    _claim("9_grpo", "with K = 9 above GRPO", "vineppo_9", "grpo", 0.0),
)

FLAGS = cli.Flags()
main = repro.Command(FLAGS, STUDY, CLAIMS).main

if __name__ == "__main__":
    cli.run(main, FLAGS)
