"""The text maze of LMRL-Gym: find the goal of a double-T maze from descriptions, one step at a time.

The policy starts on one of the 25 free cells other than the goal, uniformly, and says "move up", "move down",
"move left" or "move right". A move into a wall is legal and leaves it where it is; any other text is illegal, leaves it
where it is too, and uses a step as well.

    reward = 0 at the goal (the episode ends), else -4 for an illegal action, else -1

After `steps` actions that did not reach the goal, one more action of any text ends the episode at -1, so a legal
episode returns between -(steps + 1) and 0. A description is

    observed = 'full':     "goal 8 6 position 5 3 walls up left", rows from the top and columns from the left, from 0
    observed = 'partial':  "walls up left" (or "walls none"): where one is follows from what was done and seen

Of two policies the values are known exactly (evals/maze_exact.py, over uniform starts, 100 steps): the shortest path
returns -6.84; a uniform choice of the four moves returns -85.89 and reaches the goal in 24.68 % of the episodes.

Source: Abdulhai et al. 2023 (https://arxiv.org/abs/2311.18232), the mazes 'double_t_maze' and `standard_reward`.
Differs: words of our own and no punctuation, so that a word tokenizer reads them; the fully observed policy sees the
  earlier turns too, where the benchmark shows it the last description only.
"""

import dataclasses
import functools
import random
import zlib

from rsi_jax import base
from rsi_jax.envs import Reply

LAYOUT = (
    "#############",
    "#.....#.....#",
    "###.#####.###",
    "###.#####.###",
    "###.#####.###",
    "###.......###",
    "######.######",
    "######.######",
    "######.######",
    "#############",
)
CELLS = tuple((r, c) for r, row in enumerate(LAYOUT) for c, place in enumerate(row) if place == ".")
GOAL = (8, 6)
STARTS = tuple(cell for cell in CELLS if cell != GOAL)
OFFSETS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
ACTIONS = tuple(f"move {way}" for way in OFFSETS)
OBSERVED = ("full", "partial")
STEPS = 100
# Mean returns that the benchmark scores as 0, 50 and 100.
SCALES = {"full": (-101.0, -83.0, -6.84), "partial": (-101.0, -83.0, -25.75)}


def beside(cell: tuple[int, int], way: str) -> tuple[int, int]:
    """The cell that a move leads to: the next one, or the same before a wall."""
    after = (cell[0] + OFFSETS[way][0], cell[1] + OFFSETS[way][1])
    return after if after in CELLS else cell


@functools.cache
def best_actions() -> dict[tuple[int, int], str]:
    """The first action of the shortest path to the goal from each start; the maze is a tree, so there is one."""
    found: dict[tuple[int, int], str] = {}
    front: list[tuple[int, int]] = [GOAL]
    for cell in front:
        for way in OFFSETS:
            for start in STARTS:
                if beside(start, way) == cell and start != cell and start not in found:
                    found[start] = f"move {way}"
                    front.append(start)
    return found


def score(mean_return: float, observed: str) -> float:
    """Normalises a mean return as the benchmark does: 0 = its minimum, 50 = the mean of its data, 100 = its maximum.

      50 (x - low) / (data - low)  below the mean of the data,  50 + 50 (x - data) / (high - data)  above

    mean_return: over uniform starts, at STEPS steps. observed: one of OBSERVED.
    Source: Abdulhai et al. 2023, section 5 and table 2, and their `compute_score_normalizations.py`.
    """
    low, data, high = SCALES[observed]
    if mean_return < data:
        return 50 * (mean_return - low) / (data - low)
    return 50 + 50 * (mean_return - data) / (high - data)


@dataclasses.dataclass(frozen=True)
class State:
    """Row and column; actions done."""

    cell: tuple[int, int]
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """One turn of a demonstration: what is shown, the action; nothing is hinted and every action is trained on."""

    shown: tuple[base.Message, ...]
    action: str
    hint: str | None = None
    train: bool = True


@dataclasses.dataclass(frozen=True)
class Maze:
    """The knobs. observed: one of OBSERVED. steps: actions in which to reach the goal, >= 1.

    wander: share of the actions of a demonstration that are drawn uniformly, in [0, 1]; the others follow the shortest
    path.
    """

    observed: str = "full"
    steps: int = STEPS
    wander: float = 0.0

    def __post_init__(self):
        if self.observed not in OBSERVED:
            raise base.InputError(f"env.maze.observed={self.observed!r} is none of {', '.join(OBSERVED)}")
        if self.steps < 1:
            raise base.InputError(f"env.maze.steps={self.steps} must be at least 1")
        if not 0 <= self.wander <= 1:
            raise base.InputError(f"env.maze.wander={self.wander} must be in [0, 1]")

    @property
    def max_turns(self) -> int:
        """The steps, and the action that finds them used up."""
        return self.steps + 1

    def words(self) -> list[str]:
        """Every word that the maze can show or accept; the vocabulary of a word tokenizer."""
        numbers = map(str, range(len(LAYOUT[0])))
        return ["move", *OFFSETS, "walls", "none", "goal", "position", *numbers]

    def reset(self, seed: int) -> tuple[State, tuple[base.Message, ...]]:
        """Draws the start from `seed`."""
        state = State(random.Random(f"maze/{seed}").choice(STARTS))
        return state, (self._describe(state.cell),)

    def _describe(self, cell: tuple[int, int]) -> base.Message:
        walls = " ".join(way for way in OFFSETS if beside(cell, way) == cell) or "none"
        places = f"goal {GOAL[0]} {GOAL[1]} position {cell[0]} {cell[1]} " if self.observed == "full" else ""
        return base.Message(role="user", content=f"{places}walls {walls}")

    def step(self, state: State, text: str, finish: int) -> tuple[State, Reply]:
        """Moves. The anchor is the cell: the same for any number of steps done."""
        legal, used_up = text in ACTIONS, state.step >= self.steps
        cell = beside(state.cell, text.removeprefix("move ")) if legal and not used_up else state.cell
        right = best_actions()[state.cell]
        info = {"position": state.cell, "legal": legal, "right": right, "correct": text == right}
        anchor = zlib.crc32(repr(state.cell).encode()) & 0x7FFFFFFF
        success = cell == GOAL
        done = success or used_up
        reward = 0.0 if success else -1.0 if legal or used_up else -4.0
        if done:
            info |= {"success": success, "scale": self.observed if self.steps == STEPS else None}
        shown = () if done else (self._describe(cell),)
        return State(cell, state.step + 1), Reply(shown, reward, done, anchor, info)

    def demonstration(self, seed: int, *, hinted: bool, train_bare: bool) -> list[Step]:
        """Plays one episode along the shortest path, with a share `wander` of random actions.

        hinted, train_bare: read by no rule of this task, which has no hints.
        """
        state, shown = self.reset(seed)
        rng = random.Random(f"maze/demonstration/{seed}")
        steps, done = [], False
        while not done:
            action = rng.choice(ACTIONS) if rng.random() < self.wander else best_actions()[state.cell]
            steps.append(Step(shown, action))
            state, reply = self.step(state, action, base.STOP)
            shown, done = reply.messages, reply.done
        return steps


def make(**knobs) -> Maze:
    """Builds the environment from its knobs."""
    return Maze(**knobs)


def summary(transcripts: list[base.Transcript]) -> dict[str, float]:
    """Success, shares of illegal actions and of actions along the shortest path, and the score.

    The score is left out at another number of steps than STEPS, and where an episode was cut off.
    """
    turns = [turn for transcript in transcripts for turn in transcript.turns]
    last = [transcript.turns[-1].info for transcript in transcripts]
    found = {
        "success": sum(info.get("success", False) for info in last) / max(1, len(last)),
        "illegal": sum(not turn.info["legal"] for turn in turns) / max(1, len(turns)),
        "shortest": sum(turn.info["correct"] for turn in turns) / max(1, len(turns)),
    }
    scales = {info.get("scale") for info in last}  # None: another number of steps, or cut off before the end
    scale = scales.pop() if len(scales) == 1 else None
    if scale is None:
        return found
    mean_return = sum(transcript.score for transcript in transcripts) / len(transcripts)
    return found | {"score": score(mean_return, scale)}
