"""Core types of rsi_jax. The only types that rooms share.

Dimension key (array names end in these letters):
  B rollouts   T tokens      S segments      K views       U span tokens of a view   N hint tokens
  V vocabulary D width       F ffn           H query heads J kv heads                C head size
  L layers     G group size  O tokens of one appended chunk                          A sampled tokens of one turn
  M classes of outcomes

Log-probs are natural logs (nats), float32, and 0 where a token was not sampled by the policy.
Masks are boolean, True = keep. Token ids never tell what a token is: kinds, lengths and finish reasons come from
`Segments`, which the sampler fills (a pad id may equal the end-of-sequence id).
Columns are typed jax.Array; on the host the same fields hold numpy arrays, which every jax function takes as well.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import flax.struct
import jax
import jax.numpy as jnp

# Kinds of a segment.
PROMPT, ACTION, OBSERVATION = 0, 1, 2
# Why a segment ended: NOT_SAMPLED for prompts and observations; STOP = a stop token was sampled; LENGTH = the token
# budget of the turn or of the context ran out; ENV = the environment ended the episode after this action.
NOT_SAMPLED, STOP, LENGTH, ENV = 0, 1, 2, 3

NO_PARENT = -1
NO_ANCHOR = -1


class Segments(flax.struct.PyTreeNode):
    """Contiguous spans of each rollout, in time order, capacity S. Unused rows have length 0.

    start_BS     int32   first token of the span.
    length_BS    int32   tokens in the span; 0 = unused row.
    kind_BS      int32   PROMPT | ACTION | OBSERVATION.
    reward_BS    float32 reward that lands when the span ends (the sum over S is the return of the rollout).
    discount_BS  float32 discount applied after the span, in [0, 1]; 0 = terminal.
    finish_BS    int32   NOT_SAMPLED | STOP | LENGTH | ENV.
    anchor_BS    int32   hash of the environment state before the span (anchor groups); NO_ANCHOR if unknown.
    parent_BS    int32   segment it was branched from, for trees; NO_PARENT if none.
    """

    start_BS: jax.Array
    length_BS: jax.Array
    kind_BS: jax.Array
    reward_BS: jax.Array
    discount_BS: jax.Array
    finish_BS: jax.Array
    anchor_BS: jax.Array
    parent_BS: jax.Array


class Views(flax.struct.PyTreeNode):
    """Hinted re-readings, capacity K = B * (views per rollout), grouped by rollout in order; unused rows: weight 0.

    A view reads trunk[:insert_at], hint, trunk[insert_at : span_start + span_length] and is scored on the span.

    rollout_K      int32   row of the rollout.
    insert_at_K    int32   trunk index before which the hint stands; insert_at <= span_start.
    span_start_K   int32   first scored token (trunk index).
    span_length_K  int32   scored tokens; 0 = unused row.
    hint_KN        int32   hint tokens, padded on the right.
    hint_length_K  int32   hint tokens used; 0 = empty hint.
    source_K       int32   index of the locating rule; -1 = unused row.
    weight_K       float32 weight of the view (>= 0; 0 = unused or gated off).
    polarity_K     float32 +1 = move toward the hinted reading, -1 = contrast.
    branch         int     static: tokens that the branches of a rollout may hold together (each its hint, and
                           trunk[insert_at : span end]); 0 = each view is read on its own, from its prefix on.
    """

    rollout_K: jax.Array
    insert_at_K: jax.Array
    span_start_K: jax.Array
    span_length_K: jax.Array
    hint_KN: jax.Array
    hint_length_K: jax.Array
    source_K: jax.Array
    weight_K: jax.Array
    polarity_K: jax.Array
    branch: int = flax.struct.field(pytree_node=False, default=0)


class Layout(flax.struct.PyTreeNode):
    """Where rollouts, and the branches of their views, stand in the rows that the model reads.

    row_B    int32  row of each rollout.
    start_B  int32  index in that row at which its tokens begin.
    at_K     int32  index among the branches of that row at which the view's branch begins.
    rows, trunk, branch  int, static: rows R; tokens of a row P, and of its branches Q.
    """

    row_B: jax.Array
    start_B: jax.Array
    at_K: jax.Array
    rows: int = flax.struct.field(pytree_node=False)
    trunk: int = flax.struct.field(pytree_node=False)
    branch: int = flax.struct.field(pytree_node=False)


class Rollout(flax.struct.PyTreeNode):
    """The one data structure: a batch of trajectories, each ONE token stream, as columns.

    Stored when sampled:
      tokens_BT  int32    prompt, actions and observations; right-padded, pad id arbitrary.
      logp_BT    float32  log-prob of each sampled token as sampled (same temperature and support); 0 off-mask.
      kept_mass_BT float32 probability mass of the sampling support (1 without top-k / top-p); 1 off-mask.
      group_B    int32    rollouts with the same id share a task and a baseline; ids in [0, B).
      segments   Segments
      weight_B   float32  0 = masked from the loss (an infrastructure failure, a padding row), 1 = trained on.
      chain_B    int32    rows with the same id are one chain, in time order: an episode that went on after the policy
                          summarised it (chains.py); in [0, B). Rows that a chain does not use have length and weight 0.
    Added by stages (None until computed):
      ref_logp_BT  float32 log-prob of the sampled tokens under the reference policy; 0 off-mask.
      policy_logp_BT float32 the same under the trainer's own forward at the weights that sampled; 0 off-mask.
      value_BT     float32 critic before each sampled token; 0 off-mask.
      end_value_B  float32 critic after the last token, for rollouts that ran out of tokens.
      collision_BT float32 Σ_v π(v)² of the policy at each sampled token, in (0, 1]; 0 off-mask.
      views        Views   hinted re-readings.
      view_logp_KU float32 teacher log-prob of each sampled span token with the hint; 0 outside the span.
      wrong_logp_KU float32 the same with wrong hints: log of the mean probability over them; 0 outside the span.
      view_kl_KU   float32 KL(student || teacher) at each span token, nats, >= 0; 0 outside the span.
      hindsight_logp_BT float32 log-prob of each sampled token for who knows how the rollout ended; 0 off-mask.
      outcome_logp_BTM float32 log-prob of each sampled token under a hindsight model told that class m of M comes.
      answer_logp_BS float32 column k: mean log-prob of the tokens of the answer, given all before turn k; 0 beyond.
      judge_BS     float32 column k: a judge's score of turn k, in [0, 1]; 0 beyond.
      mc_value_BT  float32 mean return of continuations from before a sampled token; NaN where none were drawn.
      tree_B       int32   rollouts with the same id grew from one tree (share a prefix); in [0, B).
      baseline_B   float32 return expected before the rollout was seen, learned over steps.
      layout       Layout  the rows that the model reads; None = a row for each rollout.
    """

    tokens_BT: jax.Array
    logp_BT: jax.Array
    kept_mass_BT: jax.Array
    group_B: jax.Array
    segments: Segments
    weight_B: jax.Array
    chain_B: jax.Array
    ref_logp_BT: jax.Array | None = None
    policy_logp_BT: jax.Array | None = None
    value_BT: jax.Array | None = None
    end_value_B: jax.Array | None = None
    collision_BT: jax.Array | None = None
    views: Views | None = None
    view_logp_KU: jax.Array | None = None
    wrong_logp_KU: jax.Array | None = None
    view_kl_KU: jax.Array | None = None
    hindsight_logp_BT: jax.Array | None = None
    outcome_logp_BTM: jax.Array | None = None
    answer_logp_BS: jax.Array | None = None
    judge_BS: jax.Array | None = None
    mc_value_BT: jax.Array | None = None
    tree_B: jax.Array | None = None
    baseline_B: jax.Array | None = None
    layout: Layout | None = None

    @property
    def length_B(self) -> jax.Array:
        """Tokens in use per rollout."""
        s = self.segments
        return jnp.max(jnp.where(s.length_BS > 0, s.start_BS + s.length_BS, 0), axis=1)

    @property
    def segment_BT(self) -> jax.Array:
        """Segment index of each token; -1 on padding."""
        return jax.vmap(_segment_of_token, in_axes=(0, 0, None))(
            self.segments.start_BS, self.segments.length_BS, self.tokens_BT.shape[1]
        )

    @property
    def mask_BT(self) -> jax.Array:
        """True where the policy sampled the token."""
        segment_BT = self.segment_BT
        kind_BT = jnp.take_along_axis(self.segments.kind_BS, jnp.maximum(segment_BT, 0), axis=1)
        return (segment_BT >= 0) & (kind_BT == ACTION)

    @property
    def turn_BS(self) -> jax.Array:
        """Turn of each segment: the number of ACTION segments up to and including it, minus 1 (-1 = before any)."""
        s = self.segments
        return jnp.cumsum((s.kind_BS == ACTION) & (s.length_BS > 0), axis=1) - 1

    @property
    def turn_BT(self) -> jax.Array:
        """Turn of each token (an ACTION and what follows it up to the next); -1 on prompt and padding."""
        segment_BT = self.segment_BT
        turn_BT = jnp.take_along_axis(self.turn_BS, jnp.maximum(segment_BT, 0), axis=1)
        return jnp.where(segment_BT >= 0, turn_BT, -1)

    @property
    def return_B(self) -> jax.Array:
        """Undiscounted sum of the rewards of each rollout."""
        return jnp.sum(jnp.where(self.segments.length_BS > 0, self.segments.reward_BS, 0.0), axis=1)


def _segment_of_token(start_S: jax.Array, length_S: jax.Array, tokens: int) -> jax.Array:
    used_S = length_S > 0
    index_S = jnp.arange(start_S.shape[0])
    opened_T = jnp.full(tokens, -1).at[jnp.where(used_S, start_S, tokens)].max(index_S, mode="drop")
    segment_T = jax.lax.cummax(opened_T)
    end_T = jnp.where(segment_T >= 0, (start_S + length_S)[segment_T], 0)
    return jnp.where(jnp.arange(tokens) < end_T, segment_T, -1).astype(jnp.int32)


class Divergence(flax.struct.PyTreeNode):
    """Which divergence pulls the student to the teacher on a view, all fields static.

    name         'forward_kl' KL(T || S) | 'reverse_kl' KL(S || T) | 'jsd' generalised Jensen-Shannon | 'sampled'.
    alpha        jsd only, in (0, 1): m = (1 - alpha) S + alpha T; the value is divided by 4 alpha (1 - alpha), so that
                 its scale stays constant over alpha and 1/2 is the Jensen-Shannon divergence.
    top_k        0 = exact over the vocabulary; k > 0 = union of the student's and the teacher's top k, plus a tail.
    clip         per-token ceiling in nats (0 = none).
    entry_clip   bound of each word's part of a token's sum, in nats (0 = none); not for 'sampled'.
    is_clip      each token's term is multiplied by its importance weight π / μ, up to this (0 = not multiplied).
    temperature  of both distributions, > 0.
    """

    name: str = flax.struct.field(pytree_node=False, default="forward_kl")
    alpha: float = flax.struct.field(pytree_node=False, default=0.5)
    top_k: int = flax.struct.field(pytree_node=False, default=0)
    clip: float = flax.struct.field(pytree_node=False, default=0.0)
    entry_clip: float = flax.struct.field(pytree_node=False, default=0.0)
    is_clip: float = flax.struct.field(pytree_node=False, default=0.0)
    temperature: float = flax.struct.field(pytree_node=False, default=1.0)


class Credit(flax.struct.PyTreeNode):
    """What a credit variant says of each token; the loss needs nothing else.

    adv_BT         float32 advantage of each sampled token; 0 off-mask. A gradient never flows through it.
    value_target_BT float32 regression target of the critic, or None when the variant has no critic.
    view_weight_K  float32 weight of each view's divergence, or None when the variant uses no views.
    divergence     Divergence of the views (static).
    metrics        scalars to log.
    """

    adv_BT: jax.Array
    value_target_BT: jax.Array | None = None
    view_weight_K: jax.Array | None = None
    divergence: Divergence = Divergence()
    metrics: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)


class TrainState(flax.struct.PyTreeNode):
    """Everything a step reads and writes; a checkpoint is this and the host's cursor.

    step     int32   optimizer updates done in this stage.
    params   pytree  the policy (and its value head).
    opt      pytree  optimizer state.
    teacher  pytree  the teacher's own weights, or None for a live teacher.
    ref      pytree  reference policy for the KL term, or None.
    aux      dict of scalars and arrays that learn or remember: schedules, baselines, measured hint gain.
    """

    step: jax.Array
    params: Any
    opt: Any
    teacher: Any = None
    ref: Any = None
    aux: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)


CreditFn = Callable[[Rollout], Credit]


class Message(TypedDict):
    """One chat message on the host, a plain dict. role: 'system' | 'user' | 'tool' | 'assistant'."""

    role: str
    content: str


@dataclasses.dataclass
class TurnRecord:
    """One action of a transcript, with the places of its tokens in the rollout.

    shown: the messages that came in just before the action (the prompt for turn 0); reply: those that answered it.
    start, length: span of the sampled tokens. insert_at: where a hint message may stand (before the assistant header).
    finish: STOP | LENGTH | ENV. info: what the environment knows (metrics only; locating rules must not read it).
    summary: True where the policy summarised its context: no turn of the environment, nothing replied.
    """

    shown: list[Message]
    text: str
    start: int
    length: int
    insert_at: int
    finish: int
    reply: list[Message] = dataclasses.field(default_factory=list)
    reward: float = 0.0
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    summary: bool = False


@dataclasses.dataclass
class Transcript:
    """The text of one row of a rollout, on the host, in the order of the rows.

    `seed` names the task; `tokens` is the whole stream as sampled. part: place of the row in its chain, 0 begins one.
    """

    seed: int
    group: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    turns: list[TurnRecord] = dataclasses.field(default_factory=list)
    truncated: bool = False
    part: int = 0

    @property
    def score(self) -> float:
        """Undiscounted return."""
        return sum(turn.reward for turn in self.turns)


class InputError(ValueError):
    """Bad input from the user: one line that names the file, field or sample and the mend. Commands exit with 2."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Ends an error on an unknown name: "; did you mean 'x'?" for the nearest known one, '' when none is near."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    return f"; did you mean '{near[0]}'?" if near else ""


def say(error: BaseException) -> str:
    """An error of a user's code in words: its type and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def find_function(name: str, *, field: str, example: str) -> Callable[..., Any]:
    """Imports a user's function 'module:function', as the config names it.

    field: of the config. example: what to write there.
    Raises: InputError when it cannot be imported.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f"{field}={name!r} must be 'module:function', such as --config.{field}={example}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises when it loads
        raise InputError(f"{field}={name!r}: cannot import {module_name} ({say(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        mend = did_you_mean(function_name, [n for n in vars(module) if not n.startswith("_")])
        raise InputError(f"{field}={name!r}: {module_name} has no function {function_name!r}{mend}")
    return function


def require(rollout: Rollout, *columns: str) -> None:
    """Raises at trace time when a column that a function needs has not been computed.

    Raises: ValueError naming the missing columns and the stage that adds them.
    """
    missing = [name for name in columns if getattr(rollout, name) is None]
    if missing:
        raise _missing(", ".join(missing))


def given[Column](column: Column | None, name: str) -> Column:
    """Returns an optional column of a rollout that a function needs: `require` for one, to be read.

    Raises: as `require`.
    """
    if column is None:
        raise _missing(name)
    return column


def _missing(names: str) -> ValueError:
    return ValueError(f"rollout has no column {names}: train/columns.py makes each")
