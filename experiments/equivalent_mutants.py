"""Mutants of the credit variants and the losses that change nothing which a caller can see, each with its reason."""

# (function, line, mutated line, why)
EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    (
        "returns.leave_one_out",
        "return _keep((jnp.sum(kept_G) - kept_G) / jnp.maximum(others, 1), mask_G & (others > 0))",
        "return _keep((jnp.sum(kept_G) - kept_G) / jnp.maximum(others, 1), (mask_G))",
        "without others the sum of the others is exactly 0 already",
    ),
    (
        "masked.count",
        "return sum(mask, mask, axis=axis, axis_name=axis_name)",
        "return sum(mask, jnp.ones_like(mask), axis=axis, axis_name=axis_name)",
        "what is summed is the mask itself, which is 0 where it leaves out",
    ),
    (
        "masked.segment_sum",
        "kept_BT = zero(x_BT.astype(jnp.float32), segment_BT >= 0)",
        "kept_BT = (x_BT.astype(jnp.float32))",
        "the next line sends these tokens to a segment that is not there",
    ),
    (
        "masked.segment_sum",
        "index_BT = jnp.where(segment_BT >= 0, segment_BT, segments)",
        "index_BT = (segment_BT)",
        "the line before makes these tokens 0, and an index of -1 is dropped",
    ),
    (
        "losses.aggregate.aggregate_weights",
        "kept_B = weight_B > 0 if signal_B is None else (weight_B > 0) & signal_B",
        "kept_B = weight_B > 0 if signal_B is None else (signal_B)",
        "weights are >= 0, and a row of weight 0 weighs 0 whether it is kept or not",
    ),
    (
        "credit.feedback._covered",
        "edge_BT = jnp.zeros((B, T + 1), jnp.int32)",
        "edge_BT = jnp.zeros((B, (T)), jnp.int32)",
        "the column that stands at T is cut off at the end, and what is added there is dropped",
    ),
    (
        "credit.critic._token_gae",
        "last_S = jnp.where(table.used_S, table.last_S, T)",
        "last_S = (table.last_S)",
        "an unused turn has reward 0 and discount 1: it changes nothing at whatever token it stands",
    ),
    (
        "credit.critic.turn_gae",
        "value_S = jnp.where(table.used_S, value_T[table.first_S], 0.0)",
        "value_S = (value_T[table.first_S])",
        "returns.gae reads no value of an unused turn, and no sampled token belongs to one",
    ),
    (
        "credit.critic._values",
        'return jax.lax.stop_gradient(masked.zero(base.given(rollout.value_BT, "value_BT"), rollout.mask_BT))',
        "return (masked.zero(base.given(rollout.value_BT, 'value_BT'), rollout.mask_BT))",
        "what leaves the variant is stopped again in _credit",
    ),
    (
        "credit.modulate._credit",
        "adv_BT = jax.lax.stop_gradient(masked.zero(adv_BT, rollout.mask_BT).astype(jnp.float32))",
        "adv_BT = jax.lax.stop_gradient((adv_BT).astype(jnp.float32))",
        "off-mask the inner advantage and the difference are 0 already",
    ),
    (
        "credit.group.reinforce",
        "return _credit(rollout, masked.zero(return_B - centre, counted_B))",
        "return _credit(rollout, (return_B - centre))",
        "rewards.to_tokens leaves the same rollouts out again",
    ),
    (
        "credit.group.maxrl",
        "found = _credit(rollout, jnp.where(usable_B, _centred(rollout) / jnp.where(usable_B, mean_B, 1.0), 0.0))",
        "found = _credit(rollout, jnp.where(usable_B, _centred(rollout) / (mean_B), 0.0))",
        "the quotient is read only where the mean is above the floor, and has no gradient",
    ),
    (
        "credit.anchor.gigpo",
        "known_N = (table.used_S & rewards.counted_B(rollout)[:, None] & (table.anchor_S != "
        "base.NO_ANCHOR)).reshape(-1)",
        "known_N = ((rewards.counted_B(rollout)[:, None]) & (table.anchor_S != base.NO_ANCHOR)).reshape(-1)",
        "a turn that is not used has no anchor",
    ),
    (
        "credit.critic._values",
        'return jax.lax.stop_gradient(masked.zero(base.given(rollout.value_BT, "value_BT"), rollout.mask_BT))',
        "return jax.lax.stop_gradient((base.given(rollout.value_BT, 'value_BT')))",
        "returns.gae and _credit mask again, and turns are read at sampled tokens only",
    ),
    (
        "credit.critic._credit",
        "target_BT = masked.zero(jnp.where(kept_BT, target_BT, value_BT), rollout.mask_BT)",
        "target_BT = (jnp.where(kept_BT, target_BT, value_BT))",
        "off-mask nothing is kept, and _values has made the values 0 there",
    ),
    (
        "credit.group.opo",
        "return_B = masked.zero(rollout.return_B, kept_B)",
        "return_B = (rollout.return_B)",
        "a row that is not kept has length 0 in the sum, or a return that group_sum leaves out, and gets 0 at the end",
    ),
    (
        "credit.group.opo",
        "return _credit(rollout, masked.zero(return_B - earned_B / jnp.maximum(tokens_B, 1.0), kept_B))",
        "return _credit(rollout, (return_B - earned_B / jnp.maximum(tokens_B, 1.0)))",
        "a row that is not kept has return 0 and, in a group without signal, no baseline; to_tokens leaves "
        "out the rest",
    ),
    (
        "losses.policy.policy_loss",
        "adv_BT = jax.lax.stop_gradient(masked.zero(adv_BT, mask_BT))",
        "adv_BT = jax.lax.stop_gradient((adv_BT))",
        "weighted_sum masks the loss, and the log-probs that get a gradient are masked",
    ),
    (
        "credit.modulate._on_tokens",
        "used_KU = (views.weight_K > 0)[:, None] & (offset_U < views.span_length_K[:, None]) & (at_KU > 0) "
        "& (at_KU < T)",
        "used_KU = ((views.weight_K > 0)[:, None] & (offset_U < views.span_length_K[:, None]) & (at_KU > 0))",
        "what lands at T or beyond is dropped",
    ),
    (
        "credit.modulate._on_tokens",
        "place = (jnp.broadcast_to(views.rollout_K[:, None], at_KU.shape), jnp.where(used_KU, at_KU, T))",
        "place = (jnp.broadcast_to(views.rollout_K[:, None], at_KU.shape), (at_KU))",
        "what is not used adds a count of 0 and a log-prob of 0",
    ),
    (
        "credit.modulate._on_tokens",
        'total_BT = zero_BT.at[place].add(masked.zero(x_KU * views.polarity_K[:, None], used_KU), mode="drop")',
        'total_BT = zero_BT.at[place].add((x_KU * views.polarity_K[:, None]), mode="drop")',
        "what is not used goes to T, where it is dropped",
    ),
    (
        "losses.critic.value_loss",
        "old_BT, target_BT = jax.lax.stop_gradient((masked.zero(old_value_BT, mask_BT), "
        "masked.zero(target_BT, mask_BT)))",
        "old_BT, target_BT = jax.lax.stop_gradient(((old_value_BT), masked.zero(target_BT, mask_BT)))",
        "weighted_sum and the counts mask again, and the critic that gets the gradient is masked",
    ),
    (
        "losses.critic.value_loss",
        "old_BT, target_BT = jax.lax.stop_gradient((masked.zero(old_value_BT, mask_BT), "
        "masked.zero(target_BT, mask_BT)))",
        "old_BT, target_BT = jax.lax.stop_gradient((masked.zero(old_value_BT, mask_BT), (target_BT)))",
        "weighted_sum and the counts mask again, and the critic that gets the gradient is masked",
    ),
    (
        "losses.policy.policy_loss",
        "logp_BT, old_logp_BT = masked.zero(logp_BT, mask_BT), masked.zero(old_logp_BT, mask_BT)",
        "logp_BT, old_logp_BT = (logp_BT), masked.zero(old_logp_BT, mask_BT)",
        "every surrogate is linear in it with a factor that is finite off-mask, and weighted_sum masks "
        "value and gradient",
    ),
    (
        "losses.policy.policy_loss",
        "logp_BT, old_logp_BT = masked.zero(logp_BT, mask_BT), masked.zero(old_logp_BT, mask_BT)",
        "logp_BT, old_logp_BT = masked.zero(logp_BT, mask_BT), (old_logp_BT)",
        "it enters a comparison without gradient only, and weighted_sum and the counts mask the result",
    ),
    (
        "losses.policy.importance_weights",
        "ratio_BT = jnp.exp(jnp.clip(masked.zero(log_ratio_BT, mask_BT), -LOG_RATIO_MAX, LOG_RATIO_MAX))",
        "ratio_BT = jnp.exp(jnp.clip((log_ratio_BT), -LOG_RATIO_MAX, LOG_RATIO_MAX))",
        "the result is masked at the end and has no gradient",
    ),
    (
        "losses.surrogates.dppo",
        "moved_BT = jax.lax.stop_gradient(jnp.exp(logp_BT) - jnp.exp(old_logp_BT))",
        "moved_BT = (jnp.exp(logp_BT) - jnp.exp(old_logp_BT))",
        "it is compared with the bounds only, and a comparison has no gradient",
    ),
    (
        "losses.correction.correction_weights",
        '"cut": masked.sum((ratio_BT < low) | (ratio_BT > high), mask_BT) * per_token,',
        '"cut": masked.sum((ratio_BT < low) | (ratio_BT > high), jnp.ones_like(mask_BT)) * per_token,',
        "off the mask the ratio is exactly 1, which is never outside",
    ),
    (
        "credit.group.otb",
        "total = jax.vmap(lambda x_B: masked.group_sum(x_B, rollout.group_B, signal_B.astype(jnp.float32)), 1, 1)",
        "total = jax.vmap(lambda x_B: masked.group_mean(x_B, rollout.group_B, signal_B.astype(jnp.float32)), 1, 1)",
        "only the quotient of two such sums is used",
    ),
    (
        "credit.modulate.agent_opsd",
        "sign_BS = jnp.sign(masked.segment_sum(credit.adv_BT, turn_BT, segments=S))",
        "sign_BS = jnp.sign(masked.segment_mean(credit.adv_BT, turn_BT, segments=S))",
        "a mean has the sign of the sum",
    ),
    (
        "credit.turnwise.mt_grpo",
        "outcome_B = jnp.where(counted_B, masked.sum(table.reward_S, final_BS, axis=1), jnp.nan)",
        "outcome_B = jnp.where(counted_B, masked.mean(table.reward_S, final_BS, axis=1), jnp.nan)",
        "there is one last turn",
    ),
    (
        "credit.turnwise.igpo",
        "outcome_B = jnp.where(counted_B, masked.sum(table.reward_S, final_BS, axis=1), jnp.nan)",
        "outcome_B = jnp.where(counted_B, masked.mean(table.reward_S, final_BS, axis=1), jnp.nan)",
        "there is one last turn",
    ),
)
