"""From a config to the parts of a run: model, tokenizer, environment, sampler, credit, feedback. Effects at the rim."""

import dataclasses
import functools
import inspect
from typing import Any

import jax

from rsi_jax import base, credit, envs, feedback, losses, metrics, optim, sample, sharding
from rsi_jax import rollout as rollout_lib
from rsi_jax.feedback import hints, locate
from rsi_jax.feedback import teacher as teacher_lib
from rsi_jax.kernels import attention
from rsi_jax.model import chat as chat_lib
from rsi_jax.model import gguf_file, hf, tokenizer, transformer
from rsi_jax.train import columns
from rsi_jax.train.update import Objective


@dataclasses.dataclass(frozen=True)
class Parts:
    """What every stage shares."""

    config: Any
    model: transformer.Config
    start: Any
    chat: chat_lib.Chat
    env: envs.Env
    sampler: rollout_lib.Sampler
    mesh: jax.sharding.Mesh

    @property
    def evaluator(self) -> rollout_lib.Sampler:
        """The sampler on tasks that are never trained on, where the environment holds some out."""
        env = getattr(self.env, "held_out", lambda: self.env)()
        return dataclasses.replace(self.sampler, env=env)


def make_env(config, horizon: int | None = None) -> envs.Env:
    """Builds the environment of the config; `horizon` overrides its own, where it has one (for demonstrations)."""
    knobs = config.env[config.env.name].to_dict()
    if config.env.name == "jsonl":
        knobs |= {"path": config.data.path, "reward": config.reward, "held_out_path": config.data.held_out}
    if horizon is not None and "horizon" in knobs:
        knobs |= {"horizon": horizon, "goals": 0, "slack": 0}
    return envs.find(config.env.name).make(**knobs)


def make_model(config, env, *, value_head: bool) -> tuple[transformer.Config, Any, chat_lib.Chat]:
    """Builds or loads the policy: (shape, params, chat). A tiny model starts from the seed."""
    source = config.model.source
    if source == "tiny":
        if not hasattr(env, "words"):
            raise base.InputError(
                f"model.source='tiny' has a word vocabulary and env {config.env.name!r} lists none: use real weights"
            )
        words = tokenizer.WordTokenizer(env.words())
        sizes = {name: config.model[name] for name in config.model if name != "source"}
        model = transformer.Config(vocab=words.vocab_size, value_head=value_head, **sizes)
        key = jax.random.fold_in(jax.random.key(config.seed), 0)
        return model, transformer.init(model, key), chat_lib.word_chat(words, hint_place=config.feedback.hint_place)
    if source == "smollm2":
        source = str(gguf_file.find_smollm2())
    load = gguf_file.load if source.endswith(".gguf") else hf.load
    model, params, words, template = load(source, value_head=value_head)
    model = dataclasses.replace(model, dtype=config.model.dtype)
    chat = chat_lib.Chat(
        words, template, hint_role=config.feedback.hint_role or None, hint_place=config.feedback.hint_place
    )
    return model, jax.tree.map(jax.numpy.asarray, params), chat


def bind_credit(knobs, name: str | None = None) -> tuple[base.CreditFn, tuple[str, ...]]:
    """Binds a credit variant to its knobs by name: (the function, the columns it and what it wraps need)."""
    name = name or knobs.name
    function, needs = credit.find(name)
    bound = dict(knobs.get(name, {}))
    if "inner" in bound:
        bound["inner"], more = bind_credit(knobs, bound["inner"])
        needs = tuple(dict.fromkeys(needs + more))
    return functools.partial(function, **bound), needs


def credit_names(knobs) -> tuple[str, ...]:
    """The variant of the config and what it wraps, outermost first."""
    names = [knobs.name]
    while inner := knobs.get(names[-1], {}).get("inner"):
        names.append(inner)
    return tuple(names)


def make_maker(config, parts: Parts, writing: feedback.Writing) -> columns.Maker:
    """Binds how the columns of the config's variant are made."""
    return columns.Maker(
        needs=bind_credit(config.credit)[1],
        names=credit_names(config.credit),
        knobs=config.columns,
        credit=config.credit,
        chat=parts.chat,
        model=parts.model,
        sampler=parts.sampler,
        writing=writing,
        temperature=config.sample.temperature,
        chunk=config.compute.chunk,
    )


def chain_rows(config) -> int:
    """Rows of the batch that each task has."""
    return config.rollout.chain_rows if config.rollout.summarise_at else 1


def _check_chains(config) -> None:
    knobs, rows = config.rollout, chain_rows(config)
    if not knobs.summarise_at:
        return
    _need(rows > 1, f"rollout.chain_rows={rows} leaves no row to go on in: set it to 2 or more, or summarise_at to 0")
    _need(
        knobs.summarise_at < knobs.capacity,
        f"rollout.summarise_at={knobs.summarise_at} must be below rollout.capacity={knobs.capacity}",
    )
    shown = knobs.summary_shown
    _need("{summary}" in shown, f"rollout.summary_shown={shown!r} does not show {{summary}}")
    sampled = [name for name in ("mc_value_BT", "tree_B") if name in bind_credit(config.credit)[1]]
    _need(
        not sampled,
        f"credit.name={config.credit.name!r} plays on from the middle of a rollout, which cannot be done in several "
        "rows: set rollout.summarise_at=0",
    )
    micro = config.rl.micro_batch
    _need(micro % rows == 0, f"rl.micro_batch={micro} is no multiple of rollout.chain_rows={rows}: chains are not cut")


def make_chains(config, chat: chat_lib.Chat) -> rollout_lib.Chains:
    """Binds how rollouts go on when their context fills up.

    Raises: base.InputError when the model cannot read the texts, or its template no two user messages in a row.
    """
    knobs = config.rollout
    if not knobs.summarise_at:
        return rollout_lib.Chains()
    texts = {name: knobs[name].replace("{summary}", "") for name in ("summary_prompt", "summary_shown")}
    for name, text in texts.items():
        try:
            chat.start([base.Message(role="user", content=content) for content in (chat.tokenizer.probes[0], text)])
        except base.InputError as error:
            raise base.InputError(f"rollout.{name}: the model cannot read it after another message: {error}") from error
    return rollout_lib.Chains(
        chain_rows(config),
        knobs.summarise_at,
        knobs.summary_prompt,
        knobs.summary_tokens or config.sample.max_tokens,
        knobs.summary_shown,
    )


def _check_columns(config) -> None:
    names = credit_names(config.credit)
    valued = [name for name in names if name in columns.VALUED]
    changed = [
        name
        for name, off in (("kl_in_reward", 0), ("overlong_buffer", 0), ("reward_scale", 1))
        if config.rl[name] != off
    ]
    if valued and changed:
        raise base.InputError(
            f"credit.{valued[0]} values the rewards of the environment: leave rl.{changed[0]} at its default"
        )
    _need(
        not ("tree_grpo" in names and config.rl.dynamic_rounds),
        "rl.dynamic_rounds replays rollouts one by one, credit.tree_grpo grows them together: set it to 0",
    )
    if config.columns.judge:
        columns.find_judge(config.columns.judge)


def make_writing(config, policy: hints.PolicyWriter | None = None) -> feedback.Writing:
    """Binds the locating rules and the hint texts."""
    f = config.feedback
    texts = hints.Templates(dict(f.templates), dict(f.wrong), f.oracle, f.irrelevant)
    rules = locate.find(f.rules, {name: dict(f[name]) for name in f.rules if name in f})
    sizes = (f.per_rollout, f.hint_tokens, f.branch_tokens)
    return feedback.Writing(rules, f.hint, texts, *sizes, turn=f.turn, insert=f.insert, policy=policy)


def make_objective(config) -> Objective:
    """Collects the loss's knobs from the config."""
    span, rows = config.sample.max_tokens, chain_rows(config)
    if rows > 1 and "hindsight_logp_BT" in bind_credit(config.credit)[1]:  # which has a view on every turn
        span = max(span, config.rollout.summary_tokens)
    known = {field.name for field in dataclasses.fields(Objective)}
    knobs = {name: value for name, value in config.rl.items() if name in known}
    return Objective(
        **knobs,
        feedback_schedule=tuple(
            (name, config.feedback[name]) for name in ("warmup", "decay", "off_at", "fade", "min_gain")
        ),
        temperature=config.sample.temperature,
        teacher=config.feedback.teacher,
        teacher_rate=config.feedback.teacher_rate,
        teacher_every=config.feedback.teacher_every,
        span=span,
        chain_rows=rows,
        chunk=config.compute.chunk,
        remat=remat(config),
    )


def remat(config) -> transformer.Remat:
    """What the backward pass computes again, and where what it does not waits."""
    return transformer.Remat(config.compute.remat, config.compute.offload)


LEAST = (  # the least value of each field
    ("lm.updates", 0), ("lm.batch_rows", 1), ("lm.row_tokens", 2), ("rl.updates", 0), ("rl.groups", 1),
    ("rl.group_size", 1), ("rl.epochs", 1), ("rl.minibatches", 1), ("rollout.capacity", 2), ("rollout.slots", 1),
    ("evaluation.episodes", 1), ("evaluation.final_episodes", 1), ("checkpoint.every", 1), ("checkpoint.keep", 1),
    ("evaluation.every", 0), ("evaluation.samples", 0), ("feedback.per_rollout", 1), ("archive.every", 0),
    ("archive.rollouts", 1), ("feedback.watch_turns", 0), ("evaluation.gain_turns", 0),
    ("rollout.summarise_at", 0), ("rollout.summary_tokens", 0), ("rollout.chain_rows", 1),
    ("columns.continuations", 1), ("columns.every", 1), ("columns.cut_interval", 1), ("columns.roots", 1),
    ("columns.hindsight_tokens", 1), ("columns.wrong_hints", 1), ("columns.outcome_rank", 1),
    ("columns.outcome_steps", 0), ("columns.outcome_lr", 0), ("columns.anchor_similarity", 0),
)  # fmt: skip


def _need(ok: bool, text: str) -> None:
    if not ok:
        raise base.InputError(text)


def _check_rows(config) -> None:
    """How a batch is split into minibatches, and those into forwards."""
    batch, micro, row = config.rl.groups * config.rl.group_size, config.rl.micro_batch, config.rl.row_tokens
    _need(
        batch % config.rl.minibatches == 0,
        f"rl.minibatches={config.rl.minibatches} does not divide the {batch} rollouts of a batch",
    )
    rows = batch // config.rl.minibatches * chain_rows(config)
    _need(not micro or rows % micro == 0, f"rl.micro_batch={micro} does not divide the {rows} rollouts of a minibatch")
    _need(not row or not micro, f"rl.row_tokens={row} packs the rollouts into rows itself: set rl.micro_batch to 0")
    _need(
        not row or row >= config.rollout.capacity * chain_rows(config),
        f"rl.row_tokens={row} cannot hold a rollout of rollout.capacity={config.rollout.capacity} tokens"
        + f" in rollout.chain_rows={chain_rows(config)}" * (chain_rows(config) > 1),
    )
    _need(
        not config.compute.offload or config.compute.remat != "none",
        "compute.offload moves what compute.remat keeps: set compute.remat to 'attention' or 'layer'",
    )


def check(config) -> None:
    """Refuses bad values before anything is compiled, in one line that names the field.

    Raises: base.InputError.
    """
    for stage in config.stages:
        _need(stage in ("lm", "rl"), f"stages names {stage!r}, which is no stage (known: lm, rl)")
    for path, low in LEAST:
        group, name = path.split(".")
        _need(config[group][name] >= low, f"{path}={config[group][name]} must be at least {low}")
    for path in ("lm.lr", "rl.lr"):
        group, name = path.split(".")
        _need(config[group][name] >= 0, f"{path}={config[group][name]} must not be negative")
    _check_rows(config)
    _need(
        config.rl.overlong_length >= config.rl.overlong_buffer,
        f"rl.overlong_buffer={config.rl.overlong_buffer} needs rl.overlong_length of at least as many tokens",
    )
    for path, names in (
        ("rl.surrogate", losses.SURROGATES),
        ("rl.aggregation", losses.AGGREGATIONS),
        ("rl.kl_estimator", losses.KL_ESTIMATORS),
        ("rl.ratio_level", ("", *losses.RATIO_LEVELS)),
        ("rl.correction", losses.CORRECTIONS),
        ("rl.correction_level", losses.RATIO_LEVELS),
        ("rl.schedule", optim.SCHEDULES),
        ("lm.schedule", optim.SCHEDULES),
        ("lm.optimizer", optim.NAMES),
        ("rl.optimizer", optim.NAMES),
        ("compute.clock", metrics.Ledger.CLOCKS),
        ("compute.remat", transformer.REMATS),
        ("compute.attention", ("", *attention.IMPLEMENTATIONS)),
        ("feedback.teacher", teacher_lib.KINDS),
        ("feedback.hint", (*hints.WRITERS, "policy")),
        ("feedback.turn", feedback.TURNS),
        ("feedback.insert", feedback.INSERTS),
    ):
        group, name = path.split(".")
        value = config[group][name]
        mend = base.did_you_mean(value, names)
        _need(value in names, f"{path}={value!r} is none of {', '.join(map(repr, names))}{mend}")
    losses.check_correction(
        config.rl.correction, config.rl.correction_level, config.rl.correction_low, config.rl.correction_high
    )
    bind_credit(config.credit)
    if config.credit.name in config.credit:
        knobs = config.credit[config.credit.name]
        known = inspect.signature(credit.find(config.credit.name)[0]).parameters
        for name in knobs:
            _need(name in known, f"credit.{config.credit.name}.{name} is no knob of that variant")
    make_writing(config)
    _check_columns(config)
    _check_chains(config)


def make_parts(config) -> Parts:
    """Builds everything that the stages share.

    Raises: base.InputError for whatever the user can mend.
    """
    check(config)
    env = make_env(config)
    _need(
        "lm" not in config.stages or config.lm.data != "demonstrations" or hasattr(env, "demonstration"),
        f"env {config.env.name!r} demonstrates nothing: leave 'lm' out of stages, or set lm.data and lm.path",
    )
    needs = bind_credit(config.credit)[1]
    model, start, chat = make_model(config, env, value_head="value_BT" in needs)
    sampling = sample.Sampling(
        temperature=config.sample.temperature,
        top_k=config.sample.top_k,
        top_p=config.sample.top_p,
        max_tokens=config.sample.max_tokens,
        stop_ids=tuple(sorted(chat.stop_ids)),
    )
    mesh = sharding.make_mesh(config.mesh.to_dict())
    platform, kind = mesh.devices.flat[0].platform, mesh.devices.flat[0].device_kind
    model = dataclasses.replace(model, attention=config.compute.attention or attention.resolve(platform, mesh.size))
    misfit = attention.misfit(model.attention, kind, mesh.size)
    _need(not misfit, f"compute.attention={misfit}")
    sampler = rollout_lib.Sampler(
        env, chat, model, sampling, config.rollout.capacity, config.rollout.slots, make_chains(config, chat)
    )
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    _need(
        not config.rl.row_tokens or shards == 1,
        f"rl.row_tokens reads a row at a time, which mesh.data and mesh.fsdp would split in {shards}: use "
        "rl.micro_batch, or mesh.tensor",
    )
    return Parts(config, model, start, chat, env, sampler, mesh)
