"""Every field of every experiment, with its unit and the reason of its default. Other configs are short diffs.

python -m experiments.train --config=configs/default.py --config.credit.name=gae --config.rl.updates=100
"""

from ml_collections import config_dict


def _model():
    c = config_dict.ConfigDict()
    c.source = "tiny"  # 'tiny' (built in) | 'smollm2' (after `make smollm2`) | a .gguf file | a folder with safetensors
    c.width = 64  # the sizes below count for 'tiny' only
    c.layers = 2
    c.heads = 4
    c.kv_heads = 4
    c.head_size = 16
    c.ffn = 192  # SwiGLU hidden size
    c.rope_theta = 10_000.0
    c.window = 0  # tokens a query sees back, 0 = all
    c.global_every = 0  # with a window: every n-th layer sees all, the n-th first; 0 = none
    c.dtype = "float32"  # compute dtype of activations and matmuls; masters stay float32 ('bfloat16' on accelerators)
    return c


def _env():
    c = config_dict.ConfigDict()
    c.name = "tool_calls"  # a module of rsi_jax/envs
    c.tool_calls = config_dict.ConfigDict(
        dict(
            horizon=64,  # turns per episode
            goals=0,  # sub-goals per episode, 0 = horizon // 4
            slack=0,  # wasted turns allowed, 0 = max(1, horizon // 32)
            listed=6,  # of the 8 purposes, and one tool for each
            names=4,  # tools that a purpose may be listed with; with 4, knowing that a call was wrong says much
            late=True,  # sub-goals in the second half only
            penalty=0.02,  # reward lost per tool call on a small-talk turn
            renamed=0,  # listed purposes that get another tool in the middle of the session
            renamed_at=0,  # the turn whose message says so; shorter episodes (demonstrations) have none
        )
    )
    c.questions = config_dict.ConfigDict(
        dict(
            split="train",  # evaluation asks the held-out questions; 'all' = no split
            max_named=3,  # other candidates of the same kind that a right message may name
        )
    )
    c.maze = config_dict.ConfigDict(
        dict(
            observed="full",  # 'full' | 'partial': the walls only
            steps=100,  # to reach the goal; the benchmark's, its scores hold for no other number
            wander=0.0,  # share of random actions in a demonstration
        )
    )
    c.jsonl = config_dict.ConfigDict()  # configs/jsonl.py: prompts from config.data.path, reward from config.reward
    return c


def _lm():
    c = config_dict.ConfigDict()
    c.updates = 200  # optimizer updates
    c.batch_rows = 20  # packed rows per update
    c.row_tokens = 512  # tokens per packed row
    c.optimizer = "muon"  # 'adamw' | 'muon'
    c.lr = 3e-3
    c.warmup = 10  # updates
    c.schedule = "cosine"  # 'constant' | 'linear' | 'cosine'
    c.clip = 1.0  # gradient norm, 0 = none
    c.weight_decay = 0.0
    c.data = "demonstrations"  # 'demonstrations' (of the environment) | 'jsonl' (chat messages) | 'text'
    c.path = ""  # file of 'jsonl' and 'text'
    c.short_horizon = 4  # turns of an un-hinted demonstration
    c.short_share = 0.8  # share of un-hinted short demonstrations; the rest is hinted and of the RL horizon
    c.hinted_horizon = 16  # turns of the shortest hinted demonstration; they double up to the horizon of the task
    c.long_recall = False  # half of the long ones un-hinted too (the reference that needs such demonstrations)
    return c


def _rl():
    c = config_dict.ConfigDict()
    c.updates = 60  # optimizer steps = batches of rollouts (times epochs * minibatches)
    c.groups = 8  # tasks per batch
    c.group_size = 8  # rollouts per task
    c.optimizer = "adamw"  # 'adamw' | 'muon'
    c.lr = 2e-3
    c.warmup = 5  # updates: the first Adam steps are full-sized whatever the gradient is
    c.schedule = "constant"  # of lr over updates, or over max_generated and max_minutes where they end the stage
    c.weight_decay = 0.0
    c.epochs = 1  # passes over a batch
    c.minibatches = 1  # updates per pass
    c.micro_batch = 0  # rows per forward, 0 = the whole minibatch; any value gives the same gradient; whole chains
    c.row_tokens = 0  # pack rollouts into rows of so many tokens, a row at a time; 0 = a row each. The same gradient
    c.dynamic_rounds = 0  # DAPO: rounds of resampling groups without signal, 0 = off
    c.overlong_buffer = 0  # DAPO: sampled tokens before overlong_length over which a penalty grows to 1, 0 = off
    c.overlong_length = 0  # sampled tokens of a rollout at which the whole penalty is due
    c.stop_at = 2.0  # end the stage when the running success reaches this, 2 = never
    c.max_generated = 0  # end the stage after this many sampled tokens, 0 = no limit
    c.max_minutes = 0.0  # end the stage after this time (compute.clock), 0 = no limit
    c.surrogate = "ppo"  # 'ppo' | 'gspo' | 'cispo' | 'sapo' | 'gmpo' | 'dppo' | 'dro'
    c.ratio_level = ""  # '' = the surrogate's own | 'token' | 'sequence'
    c.aggregation = "token_mean"  # 'token_mean' | 'sequence_mean' | 'prompt_mean' | 'constant'
    c.aggregation_constant = 0.0  # tokens per sequence, for 'constant' (Dr.GRPO)
    c.clip_low = 0.2  # distance of the ratio from 1; in log space for gmpo, of the probability for dppo
    c.clip_high = 0.2
    c.dual_clip = 0.0  # 0 = off, else > 1; for dppo the bound of the importance weight
    c.sapo_tau_pos = 1.0  # sharpness of the soft gate where the advantage is positive
    c.sapo_tau_neg = 1.05
    c.dro_beta = 0.05  # quadratic penalty on the log-ratio
    c.correction = "none"  # weigh tokens by trainer / sampler: 'truncate' (TIS) | 'mask' (IcePop: 0 outside the bounds)
    c.correction_level = "token"  # 'token' | 'sequence' (geometric mean over the rollout) | 'product'
    c.correction_low = 0.0  # bounds of the ratio: 0 and 2 for TIS (Yao et al. 2025) ...
    c.correction_high = 2.0  # ... 0.5 and 5 for IcePop (arXiv 2510.18855)
    c.kl_coef = 0.0  # KL to the policy at the start of the stage, in the loss
    c.kl_estimator = "k3+"  # 'k1' | 'k2' | 'k3' | 'k3+'
    c.reward_scale = 1.0  # credit sees rewards times this (a critic wants returns near 1); reports show them as paid
    c.kl_in_reward = 0.0  # the same KL taken off the rewards instead
    c.entropy_coef = 0.0
    c.value_coef = 0.5
    c.value_clip = 0.2
    c.outcome_clip = 1.0  # norm of the outcome gradient, 0 = none
    c.feedback_clip = 1.0  # norm of the feedback gradient, 0 = none: each is clipped on its own
    c.parity_tol = 1e-3  # nats: refuse to train when the sampler's log-probs differ more from the trainer's
    return c


def _credit_knobs() -> dict[str, dict]:
    """Knobs of the variants: published values where there are any; reasons and ranges stand in the docstrings."""
    edges = (-1e-6, 1e-6, 0.5)  # class m of an outcome: edges[m-1] <= x < edges[m], in units of the reward
    return {
        "reinforce": dict(baseline="none"),
        "rloo": {},
        "grpo": dict(scale="std", std_floor=1e-6, per="rollout"),
        "dr_grpo": {},
        "maxrl": dict(floor=1e-6),  # of the group's mean return
        "opo": {},
        "rae": dict(decay=0.95),  # share of the past in the running mean of returns
        "otb": {},
        "reinforce_pp": {},
        "reinforce_pp_baseline": {},
        "centred_return_to_go": dict(discount=1.0),  # per turn
        "turn_rloo": dict(discount=1.0),  # per turn
        "mt_grpo": dict(turn_weight=1.0, outcome_weight=1.0, scale="std", std_floor=1e-6),
        "prm": dict(inner="grpo", weight=1.0, form="difference"),
        "pbrs": dict(inner="centred_return_to_go", weight=1.0, discount=1.0),
        "igpo": dict(weight=0.1, discount=1.0, std_floor=1e-6),
        "gigpo": dict(inner="grpo", omega=1.0, discount=0.95, scale="none", std_floor=1e-6),
        "gae": dict(discount=1.0, lambda_=0.95, scale="none"),  # per sampled token
        "vapo": dict(alpha=0.05, discount=1.0, scale="none"),  # per sampled token
        "turn_gae": dict(discount=0.99, lambda_=0.9, scale="none"),  # per turn
        "vineppo": {},
        "spo": dict(prob_max=0.9),
        "tree_grpo": dict(scale="std", std_floor=1e-6),
        "hcapo": dict(
            inner="grpo", omega=1.0, discount=0.95, temperature=5.0, clip_low=0.8, clip_high=1.2,
            denominator="trajectory", smooth=False, success_return=0.5, std_floor=1e-6,
        ),
        "hca": dict(edges=edges, clip=0.0),
        "cocoa": dict(edges=edges, clip=0.0),
        "rlsd": dict(inner="grpo", mix=0.5, clip=0.2),
        "opd": dict(inner="grpo", weight=1.0, clip=0.0),
        "vopd": dict(inner="grpo", weight=1.0, clip=0.0),
        "agent_opsd": dict(inner="grpo", mix=0.5, clip=0.2, discount=0.95, success_return=0.5, prior_clip=0.05),
        "rlcsd": dict(inner="grpo", temperature=0.02, beta=1.0, mix=0.5, bound=2.0, threshold=0.02),
        "sdpo": dict(
            inner="grpo", weight=1.0, outcome_weight=0.0, alpha=0.5, top_k=100, is_clip=2.0, success_return=0.5
        ),
    }  # fmt: skip


def _credit():
    c = config_dict.ConfigDict()
    c.name = "textual_feedback"  # any public function of rsi_jax/credit; its knobs stand below under its name
    for name, values in _credit_knobs().items():
        c[name] = config_dict.ConfigDict(values)
    gate = dict(
        failed_only=False,  # only views of rollouts that failed
        success_return=config_dict.placeholder(float),  # failed = return below this; None = below the group's best
    )
    c.locator_penalty = config_dict.ConfigDict(dict(inner="dr_grpo", penalty=1.0, **gate))  # the control without words
    c.textual_feedback = config_dict.ConfigDict(
        dict(
            inner="dr_grpo",  # the variant that makes the advantages
            weight=1.0,  # of the feedback loss, before its gradient is clipped
            divergence="forward_kl",  # 'forward_kl' | 'reverse_kl' | 'jsd' | 'sampled'
            alpha=0.5,  # jsd mixture
            top_k=0,  # 0 = the whole vocabulary
            clip=0.0,  # nats per token, 0 = none
            entry_clip=0.0,  # nats per word of a token's sum, 0 = none; not for 'sampled'
            temperature=1.0,
            **gate,
        )
    )
    return c


def _columns():
    """How the columns are made that some credit variants read besides the sampled ones (rsi_jax/train/columns.py)."""
    c = config_dict.ConfigDict()
    c.continuations = (
        9  # vineppo, spo: fresh continuations of each place, as published; the cost of a batch grows with it
    )
    c.every = 1  # vineppo: turns from one valued turn to the next
    c.cut_interval = 5  # spo: improbable tokens of a segment
    c.roots = 2  # tree_grpo: trees per group; the other rollouts fork from them
    c.judge = ""  # prm, pbrs: 'module:function' of transcripts; '' = 0 where a locating rule fires, else 1
    c.hindsight = (
        "{shown}"  # hcapo: how it ended: the last messages {shown}, the last action {said}; "" = nothing, the control
    )
    c.hindsight_tokens = 48  # capacity of that hint; a longer one is an error, never cut
    c.wrong_hints = 2  # rlcsd: the 'wrong' hint, then shuffled ones
    c.outcome_rank = 8  # hca, cocoa: rank of the learned hindsight model
    c.outcome_lr = 0.01
    c.outcome_steps = 4  # steps of it per batch
    c.anchor_similarity = 0.0  # gigpo: turns shown texts that agree to this share one state; 0 = the environment's own
    return c


def _feedback():
    c = config_dict.ConfigDict()
    c.rules = ("failed_tool_call", "malformed_call")  # functions of rsi_jax/feedback/locate.py, first match wins
    c.long_answer = config_dict.ConfigDict(dict(max_words=25))  # knobs of the rule of that name
    c.turn = "located"  # where hints stand: at the located turns | 'other': at others, drawn (a control)
    c.insert = "turn"  # before the turn | 'first': before the first turn of the row (branches of the whole row)
    c.hint_place = "message"  # a hint stands before the message that the turn answers | 'header': after it
    c.hint_role = ""  # role of a hint message in a chat template, '' = 'hint' where it has one, else 'system'
    c.hint = "template"  # 'template' | 'empty' | 'irrelevant' | 'shuffled' | 'wrong' | 'oracle' | 'policy'
    c.templates = config_dict.ConfigDict(
        dict(failed_tool_call="reminder {tools}", malformed_call="reminder {tools}", long_answer="")
    )
    c.wrong = config_dict.ConfigDict(
        dict(failed_tool_call="reminder {wrong_tools}", malformed_call="reminder {wrong_tools}", long_answer="")
    )
    c.oracle = "reminder {right}"
    c.policy_prompt = (  # what the policy is asked when it writes its own hints
        "An assistant was asked: {request}\nIt answered: {said}\nWhat is wrong with that: {fault}.\n"
        "Write one short instruction that would have prevented it."
    )
    c.faults = config_dict.ConfigDict(  # what is wrong, by rule, in the policy's prompt
        dict(
            failed_tool_call="there is no such tool",
            malformed_call="the call cannot be read",
            long_answer="the answer is too long",
        )
    )
    c.irrelevant = "reminder weather lunch news music traffic sports travel garden"
    c.hint_tokens = 24  # capacity of a hint; a longer one is an error, never cut
    # Capacity of a rollout's branches: each a hint, and the trunk from its place to the end of the located turn.
    # 0 = what each batch needs, rounded up to a power of two (another shape to compile now and then).
    c.branch_tokens = 128
    c.per_rollout = 4  # hinted turns per rollout at most
    c.teacher = "frozen"  # 'live' | 'ema' | 'frozen' | 'snapshot'
    c.teacher_rate = 0.05  # ema: share of the policy taken per update
    c.teacher_every = 10  # snapshot: updates between copies
    c.warmup = 1  # updates over which the weight rises
    c.decay = 0  # updates over which the weight falls to 0, 0 = never
    c.off_at = 1.0  # running success at which the weight is 0; 2 = never
    c.fade = 0.2  # range of running success below off_at over which the weight falls to 0
    c.watch_turns = 16  # located turns per batch at which the right action's probability is measured, 0 = none
    c.min_gain = -1.0  # measured hint gain below which feedback is gated off; -1 = never
    return c


def _evaluation():
    c = config_dict.ConfigDict()
    c.episodes = 128  # per evaluation during training
    c.final_episodes = 512  # before and after each RL stage
    c.every = 10  # updates between evaluations, 0 = only before and after
    c.seed = 1_000_003  # tasks of evaluation, apart from those of training
    c.gain_turns = 64  # located turns at most on which the hint gain is measured
    c.samples = 3  # transcripts kept for the report
    c.perplexity_text = ""  # text whose perplexity is watched: a path or a file of rsi_jax/data; '' = none
    return c


def get_config():
    c = config_dict.ConfigDict()
    c.seed = 0
    c.stages = ("lm", "rl")  # run in this order
    c.run_dir = ""  # '' = runs/<config name>-<digest of the effective config>
    c.init_from = ""  # run folder whose last stage that is also ours (before rl) is taken over instead of trained
    c.reward = ""  # 'module:function' of configs/jsonl.py
    c.data = config_dict.ConfigDict(dict(path="", held_out=""))  # JSONL of configs/jsonl.py; held_out: of evaluation
    c.model = _model()
    c.env = _env()
    c.rollout = config_dict.ConfigDict(
        dict(
            capacity=448,  # tokens of context per rollout
            slots=64,  # streams decoded at a time; any value gives the same rollouts
            summarise_at=0,  # tokens in the context from which on the policy summarises it and goes on; 0 = never
            chain_rows=4,  # contexts of an episode at most, then it is truncated; a batch holds as many rows of each
            summary_prompt="Summarise the work so far: what was asked, what was found, what is left to do.",
            summary_shown="{summary}",  # the user message of the next context that holds it, after those of the task
            summary_tokens=0,  # budget of a summary, the stop token included; 0 = sample.max_tokens
        )
    )
    c.sample = config_dict.ConfigDict(
        dict(
            temperature=1.0,
            top_k=0,  # 0 = off
            top_p=1.0,  # 1 = off
            max_tokens=4,  # per turn, the stop token included
        )
    )
    c.lm = _lm()
    c.rl = _rl()
    c.adam = config_dict.ConfigDict(
        dict(b1=0.9, b2=0.95)
    )  # moments of AdamW, and of the parameters that Muon leaves to it
    c.credit = _credit()
    c.columns = _columns()
    c.feedback = _feedback()
    c.evaluation = _evaluation()
    c.checkpoint = config_dict.ConfigDict(dict(every=20, keep=2))  # updates between saves; steps kept
    c.archive = config_dict.ConfigDict(dict(every=10, rollouts=8))  # batches between archived ones, 0 = off; first rows
    c.track = ()  # extra trackers: 'wandb', 'trackio'
    c.mesh = config_dict.ConfigDict(dict(data=-1, fsdp=1, tensor=1, context=1))  # devices per axis, -1 = what is left
    c.compute = config_dict.ConfigDict(
        dict(
            chunk=0,  # tokens scored at a time, 0 = 2^21 logits but at least 128 tokens, for CPUs; accelerators: 4096
            remat="none",  # what the backward pass computes again: 'none', 'attention' (all but attention) or 'layer'
            attention="",  # 'chunked', 'tpu', 'mosaic_gpu' (linear memory) | 'reference' (O(T^2)); '' = the device's
            clock="wall",  # of the time of phases and rl.max_minutes; 'cpu' = of this process, for CPUs that are shared
            offload=False,  # what remat keeps waits in the host's memory; needs remat 'attention' or 'layer'
        )
    )
    return c
