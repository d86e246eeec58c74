"""Lists the faults planted on the way from a rollout to the trainer and back: the feed, the exchange of rows and the
weights."""

from __future__ import annotations

from mutants.table import Mutant

FEED = (
    Mutant(
        name="fresh-by-one-sample",
        file="megatron_rl/rollout/queue.py",
        line="return sorted(set(facts.groups.tolist()) - set(facts.groups[stale].tolist()))",
        becomes="return sorted(set(facts.groups[~stale].tolist()))",
        fault="a group counts as fresh where one of its samples is",
        tests=("tests/unit/rollout/test_queue.py::test_a_group_is_too_old_where_one_of_its_samples_is",),
    ),
    Mutant(
        name="replayed-beside-itself",
        file="megatron_rl/rollout/groups/replay.py",
        line="keys = self.buffer.draw(len(selection.dead), rollout=index, exclude=names)",
        becomes="keys = self.buffer.draw(len(selection.dead), rollout=index)",
        fault="a group that the batch has itself is replayed beside itself",
        tests=("tests/unit/rollout/test_queue.py::test_no_group_is_replayed_beside_itself",),
    ),
    Mutant(
        name="remembered-as-its-newest-token",
        file="megatron_rl/rollout/groups/replay.py",
        line="version = int(facts.weight_versions[facts.groups == number].min())",
        becomes="version = int(facts.weight_versions[facts.groups == number].max())",
        fault="a group's age in the replay buffer is that of its newest sample",
        tests=("tests/unit/rollout/test_queue.py::test_a_remembered_group_is_as_old_as_its_oldest_sample",),
    ),
    Mutant(
        name="passes-of-what-was-replaced",
        file="megatron_rl/rollout/training_batch.py",
        line="if int(part.facts.groups[i]) in unchanged:",
        becomes="if int(part.facts.places[i]) in row_of:",
        fault="a group that took another's place has the other's old log-probs",
        tests=(
            "tests/unit/rollout/test_queue.py::test_known_log_probs_equal_a_loop_over_what_was_passed_and_not_replaced",
        ),
    ),
    Mutant(
        name="noise-a-step-too-long",
        file="megatron_rl/trainer/advantages/noise.py",
        line="if self.rl_steps() >= self.steps:",
        becomes="if self.rl_steps() > self.steps:",
        fault="the step after the last noisy one has noise",
        tests=(
            "tests/unit/algorithm/test_noise.py::test_first_losses_are_zero_without_noise_and_only_the_first_with_it",
        ),
    ),
    Mutant(
        name="gdpo-without-the-overlong",
        file="megatron_rl/rollout/scored_batch.py",
        line="columns, weights = np.column_stack([by_function, shape]), (*weights, reward.overlong_penalty)",
        becomes="pass",
        fault="`gdpo` does not see the overlong punishment",
        tests=(
            "tests/unit/reward/test_overlong.py::test_the_punishment_is_part_of_the_total_and_a_function_of_its_own_for_gdpo",
        ),
    ),
    Mutant(
        name="masked-samples-train",
        file="megatron_rl/trainer/corrections.py",
        line="return CorrectedSignal(weights=weights, signal=left, metrics=metrics)",
        becomes="return CorrectedSignal(weights=weights, signal=signal, metrics=metrics)",
        fault="samples whose importance weights are all 0 keep their signal",
        tests=("tests/equality/test_correction.py::test_a_run_whose_every_sample_is_masked_is_ghosts",),
    ),
    Mutant(
        name="replay-a-version-too-short",
        file="megatron_rl/rollout/groups/replay_buffer.py",
        line="return [] if limit is None else self._remove(lambda entry: version - entry.version > limit)",
        becomes="return [] if limit is None else self._remove(lambda entry: version - entry.version >= limit)",
        fault="replayed groups go a version early",
        tests=("tests/unit/rollout/test_replay_buffer.py::test_age_is_in_weight_versions_and_null_never_expires",),
    ),
    Mutant(
        name="failed-below-the-threshold",
        file="megatron_rl/rollout/groups/reroll_buffer.py",
        line="above = groups[included & (totals > threshold)]",
        becomes="above = groups[included & (totals >= threshold)]",
        fault="a group at the threshold has not failed",
        tests=("tests/unit/rollout/test_reroll_buffer.py::test_failed_groups_equal_a_loop",),
    ),
    Mutant(
        name="staler-by-one",
        file="megatron_rl/rollout/staleness.py",
        line="return max_staleness_steps is None or trained + ahead - version <= max_staleness_steps",
        becomes="return max_staleness_steps is None or trained + ahead - version <= max_staleness_steps + 1",
        fault="a rollout is started that will be a version too old",
        tests=("tests/unit/rollout/test_staleness.py::test_every_state",),
    ),
)

EXCHANGE = (
    Mutant(
        name="rows-for-every-stage",
        file="megatron_rl/backend/batch_exchange.py",
        line="ends = (0, topology.pipeline_size - 1)",
        becomes="ends = range(topology.pipeline_size)",
        fault="stages in the middle of a pipeline receive rows that they do not read",
        tests=("tests/unit/backend/test_batch_exchange.py::test_rows_go_to_the_ends_of_each_replicas_pipeline_alone",),
    ),
    Mutant(
        name="scores-as-they-come",
        file="megatron_rl/backend/batch_exchange.py",
        line="rows = sorted((row for part in gather_json(local) for row in part), key=lambda row: row[0])",
        becomes="rows = [row for part in gather_json(local) for row in part]",
        fault="rewards stand in the order of the ranks, not of the batch",
        tests=("tests/equality/test_exchange.py::test_scores_arrive_in_order_with_their_gaps",),
    ),
    Mutant(
        name="row-without-its-version",
        file="megatron_rl/backend/batch_exchange.py",
        line="weight_version=int(facts.weight_versions[index]),",
        becomes="",
        fault="a row that came from another rank has lost its weight version",
        tests=("tests/unit/backend/test_batch_exchange.py::test_a_row_comes_back_as_it_was_sent",),
    ),
    Mutant(
        name="gathered-in-half-precision",
        file="megatron_rl/backend/batch_exchange.py",
        line="flat[offsets[i] : offsets[i + 1]] = torch.from_numpy(of(local[facts.owner_rows[i]]).astype(np.float32))",
        becomes="flat[offsets[i] : offsets[i + 1]] = "
        "torch.from_numpy(of(local[facts.owner_rows[i]]).astype(np.float16))",
        fault="the engine's log-probs are gathered in half precision",
        tests=("tests/equality/test_correction.py",),
    ),
)

WEIGHTS = (
    Mutant(
        name="qkv-not-by-group",
        file="megatron_rl/weights/mapping.py",
        line="return torch.cat([x.view(groups, -1, *x.shape[1:]) for x in parts], dim=1).flatten(0, 1)",
        becomes="return torch.cat(parts)",
        fault="q, k and v are laid one after the other, not by query group",
        tests=("tests/equality/test_weights.py::test_logprobs_equal_hugging_face_and_export_equals_import[1-1]",),
    ),
    Mutant(
        name="first-ranks-shard-everywhere",
        file="megatron_rl/weights/mapping.py",
        line="return [(part, 0, first + rank * x, first + (rank + 1) * x) for part, first, x in shares]",
        becomes="return [(part, 0, first, first + x) for part, first, x in shares]",
        fault="every tensor rank loads the first one's shard",
        tests=("tests/equality/test_weights.py::test_logprobs_equal_hugging_face_and_export_equals_import[2-1]",),
    ),
    Mutant(
        name="joined-parts-in-halves",
        file="megatron_rl/weights/mapping.py",
        line="return [(name, sum(rows[:i]), each) for i, each in enumerate(rows)]",
        becomes="return [(name, i * each, each) for i, each in enumerate(rows)]",
        fault="of q, k and v in one tensor k begins where q's first k's worth of rows ends",
        tests=("tests/equality/test_weights.py::test_logprobs_equal_hugging_face_and_export_equals_import[1-1]",),
    ),
    Mutant(
        name="norm-over-a-ranks-heads",
        file="megatron_rl/model/post_norm.py",
        line="if ranks > 1:",
        becomes="if ranks < 1:",
        fault="a norm over all heads of q sums a tensor rank's own alone",
        tests=("tests/equality/test_weights.py::test_logprobs_equal_hugging_face_and_export_equals_import[2-1]",),
    ),
    Mutant(
        name="norms-sum-without-its-gradient",
        file="megatron_rl/model/post_norm.py",
        line="dist.all_reduce(total, group=ctx.group)",
        becomes="",
        fault="the gradient through the sum of q's squares is of a rank's own heads alone",
        tests=("tests/equality/test_gradient.py::test_skip_and_dense_equal_reference_for_every_reduction[TP2 olmo2]",),
    ),
    Mutant(
        name="experts-dealt-in-turn",
        file="megatron_rl/weights/entry.py",
        line="number = expert_rank * (shape.num_experts // expert_size) + self.expert",
        becomes="number = self.expert * expert_size + expert_rank",
        fault="experts are dealt to ranks in turn, not in blocks",
        tests=("tests/equality/test_experts.py::test_mixtures_equal_reference[EP2 qwen3_moe_unnormalised]",),
    ),
    Mutant(
        name="tied-embedding-exported-twice",
        file="megatron_rl/weights/export.py",
        line="if entry == TIED_HEAD:",
        becomes="if entry == TIED_HEAD and stages == 1:",
        fault="a tied embedding is sent a second time, from the output layer's copy",
        tests=("tests/equality/test_export.py::test_export_equals_reference_in_buckets_of_any_size[PP2 qwen2_tied]",),
    ),
    Mutant(
        name="chunks-in-rank-order",
        file="megatron_rl/weights/export.py",
        line="stage = number * topology.pipeline_size + topology.pipeline_rank",
        becomes="stage = topology.pipeline_rank * len(chunks) + number",
        fault="interleaved stages load layers as if each rank held neighbours",
        tests=("tests/equality/test_weights.py::test_logprobs_under_interleaved_stages_equal_hugging_face",),
    ),
    Mutant(
        name="checksum-without-its-length",
        file="megatron_rl/weights/checksum.py",
        line="vector[-1] = num_bytes",
        becomes="",
        fault="tensors of zeros of different lengths have one checksum",
        tests=("tests/unit/weights/test_checksum.py::test_lengths_of_zeros_differ",),
    ),
    Mutant(
        name="gate-is-up",
        file="megatron_rl/weights/fused.py",
        line="for part, rows in zip((names.gate, names.up), both.chunk(2), strict=True):",
        becomes="for part, rows in zip((names.up, names.gate), both.chunk(2), strict=True):",
        fault="a mixture's gate and up projections change places",
        tests=("tests/equality/test_weights.py::test_names_in_memory_become_those_of_files",),
    ),
    Mutant(
        name="last-bucket-not-sent",
        file="megatron_rl/rollout/weight_sync/sender.py",
        line="if self.buffers[turn] is not None and self.buffers[turn].used:",
        becomes="if self.buffers[turn] is not None and not self.buffers[turn].fits(tensor):",
        fault="the last bucket of a sync is sent where it is full, and else not at all",
        tests=("tests/unit/rollout/test_sender.py::test_every_tensor_reaches_every_engine_bit_by_bit",),
    ),
    Mutant(
        name="receipt-by-version-alone",
        file="megatron_rl/rollout/weight_sync/sender.py",
        line="if WeightReceipt(**receipt) != wanted:",
        becomes="if WeightReceipt(**receipt).version != wanted.version:",
        fault="an engine's receipt is believed whatever its checksum is",
        tests=("tests/unit/rollout/test_sender.py::test_an_engine_whose_receipt_differs_has_no_version",),
    ),
    Mutant(
        name="bucket-of-its-own-checksum-alone",
        file="megatron_rl/rollout/weight_sync/transport.py",
        line='self._digest.update(f"{checksum}/{num_tensors};".encode())',
        becomes='self._digest.update(f"{checksum};".encode())',
        fault="the text over a sync's buckets does not hold how many tensors each had",
        tests=("tests/unit/rollout/test_transport.py::test_a_tally_is_of_the_order_and_of_the_counts",),
    ),
)

ROLLOUTS = (*FEED, *EXCHANGE, *WEIGHTS)
