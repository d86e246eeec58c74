"""Lists the faults planted where ranks train together: schedule, optimizer, packing, log-probs and the trained
model."""

from __future__ import annotations

from mutants.table import Mutant

SCHEDULE = (
    Mutant(
        name="silent-ranks-do-not-gather",
        file="megatron_rl/backend/schedule.py",
        line="if mini_batch.silent_ranks:",
        becomes="if mini_batch.silent_ranks and microbatches:",
        fault="a rank without micro-batches does not join the parameter gather",
        tests=(
            "tests/equality/test_overlap.py::test_every_pair_of_patterns_of_empty_ranks_equals_the_run_without_overlap",
        ),
    ),
    Mutant(
        name="step-outside-the-lockstep",
        file="megatron_rl/backend/schedule.py",
        line='list(hashlib.sha256(f"{step}/{kind.value}/".encode() + fingerprint).digest()[:8]), dtype=torch.int64',
        becomes='list(hashlib.sha256(f"{kind.value}/".encode() + fingerprint).digest()[:8]), dtype=torch.int64',
        fault="ranks at different steps are taken to run the same",
        tests=("tests/equality/test_lockstep.py::test_every_rank_names_the_odd_one[1-3-0-step index]",),
    ),
    Mutant(
        name="responses-see-the-prompts-pads",
        file="megatron_rl/model/attention/packed.py",
        line="seen[segment] = [own[prompt.segment][0], *own[segment]]",
        becomes="seen[segment] = [*own[prompt.segment], *own[segment]]",
        fault="under Transformer Engine's layers a response sees the pads of a shared prompt",
        tests=("tests/unit/model/test_key_segments.py::test_each_query_sees_the_keys_of_its_own_sample",),
    ),
    Mutant(
        name="square-of-the-sum",
        file="megatron_rl/model/attention/layout.py",
        line="return float((whole - prompts).sum())",
        becomes="return float(sum(self.lengths) ** 2)",
        fault="a micro-batch's Σ l² is measured as (Σ l)²",
        tests=("tests/unit/backend/test_schedule.py::test_squares_of_a_micro_batch_equal_a_loop_over_its_sequences",),
    ),
    Mutant(
        name="first-chunk-measured-alone",
        file="megatron_rl/backend/schedule.py",
        line="forward_s = np.concatenate([run.forward_s.sum(0) for run in runs])",
        becomes="forward_s = np.concatenate([run.forward_s[0] for run in runs])",
        fault="a stage of several chunks is measured by its first",
        tests=("tests/unit/backend/test_schedule.py::test_sums_of_a_stage_equal_a_loop_over_runs_and_chunks",),
    ),
)

OPTIMIZER = (
    Mutant(
        name="frozen-ghost-counts-as-applied",
        file="megatron_rl/backend/optimizer.py",
        line='applied = self.ghost == "dense"',
        becomes="applied = True",
        fault="`skip.ghost=freeze` steps all the same",
        tests=("tests/equality/test_steps.py::test_frozen_ghost_moves_nothing",),
    ),
    Mutant(
        name="experts-gradient-in-shards",
        file="megatron_rl/backend/optimizer.py",
        line="for group in (g for chunk in self.chunks for g in (*chunk.bucket_groups, "
        "*chunk.expert_parallel_bucket_groups)):",
        becomes="for group in (g for chunk in self.chunks for g in chunk.bucket_groups):",
        fault="`gradient()` leaves experts' gradients in the shards of the distributed optimizer",
        tests=("tests/equality/test_experts.py::test_mixtures_equal_reference[TP2-SP-ETP1-sharded qwen3_moe]",),
    ),
    Mutant(
        name="norm-is-not-clipped",
        file="megatron_rl/backend/optimizer.py",
        line="self._clip(norm, None if adam is None else adam.clip_grad)",
        becomes="",
        fault="the gradient norm is measured and not clipped",
        tests=("tests/runs/test_run.py::test_two_epochs_equal_a_plain_adamw_loop[qwen2_tied-1-1-1]",),
    ),
    Mutant(
        name="reduction-without-tied-embeddings",
        file="megatron_rl/backend/optimizer.py",
        line="finalize_model_grads(self.chunks, None)",
        becomes="[chunk.finish_grad_sync() for chunk in self.chunks]",
        fault="gradients of tied embeddings and of sequence-parallel norms are not summed",
        tests=("tests/runs/test_run.py::test_two_epochs_equal_a_plain_adamw_loop[qwen2_tied-2-2-1]",),
    ),
    Mutant(
        name="second-beta-is-the-first",
        file="megatron_rl/backend/optimizer.py",
        line="adam_beta2=settings.betas[1],",
        becomes="adam_beta2=settings.betas[0],",
        fault="AdamW's second moment decays as its first",
        tests=("tests/runs/test_run.py::test_two_epochs_equal_a_plain_adamw_loop[qwen2_tied-1-1-1]",),
    ),
    Mutant(
        name="warm-up-from-zero",
        file="megatron_rl/backend/optimizer.py",
        line="init_lr=settings.lr / (settings.warmup_steps + 1),",
        becomes="init_lr=0.0,",
        fault="the first step of a warm-up has a learning rate of 0",
        tests=("tests/unit/backend/test_learning_rate.py::test_learning_rates_equal_the_formula",),
    ),
    Mutant(
        name="decay-steps-not-heard",
        file="megatron_rl/backend/optimizer.py",
        line="lr_decay_steps=max(settings.decay_steps or total_steps, settings.warmup_steps + 1, 1),",
        becomes="lr_decay_steps=max(total_steps, settings.warmup_steps + 1, 1),",
        fault="the schedule decays over the whole run, whatever `optimizer.decay_steps` says",
        tests=("tests/unit/backend/test_learning_rate.py::test_learning_rates_equal_the_formula",),
    ),
)

PACKING = (
    Mutant(
        name="predicted-from-itself",
        file="megatron_rl/backend/packing.py",
        line="places = local[own - 1]",
        becomes="places = local[own]",
        fault="a token's log-prob is read at its own position",
        tests=("tests/unit/backend/test_packing.py::test_microbatch_equals_naive",),
    ),
    Mutant(
        name="flat-by-slot",
        file="megatron_rl/backend/packing.py",
        line="flat.append(offsets[i] + (chosen[:, None] * width + np.arange(width)).reshape(-1))",
        becomes="flat.append(offsets[slot] + (chosen[:, None] * width + np.arange(width)).reshape(-1))",
        fault="a token's old log-prob is another sample's",
        tests=("tests/unit/backend/test_packing.py::test_microbatch_equals_naive",),
    ),
    Mutant(
        name="filler-has-loss-tokens",
        file="megatron_rl/backend/packing.py",
        line="chosen = np.flatnonzero(row.loss_mask if not microbatch.filler else np.zeros_like(row.loss_mask))",
        becomes="chosen = np.flatnonzero(row.loss_mask)",
        fault="a filler's sample is trained once more",
        tests=("tests/unit/backend/test_packing.py::test_filler_runs_the_same_tokens_and_has_no_loss_token",),
    ),
    Mutant(
        name="engines-log-prob-of-another-token",
        file="megatron_rl/backend/packing.py",
        line="rollout.append(np.repeat(row.logprobs[chosen], width))",
        becomes="rollout.append(np.repeat(row.logprobs[: len(chosen)], width))",
        fault="behind a hole in the mask the engine's log-probs are off by the hole",
        tests=("tests/unit/backend/test_packing.py::test_masked_token_in_mid_response_is_read_but_not_trained",),
    ),
)

LOGPROBS = (
    Mutant(
        name="pads-take-probability",
        file="megatron_rl/model/logprob/chunks.py",
        line="num_valid = max(0, min(width, vocab_size - start))",
        becomes="num_valid = width if start < vocab_size else 0",
        fault="rows that pad the vocabulary take probability",
        tests=("tests/unit/model/test_logprob.py::test_padded_columns_take_no_probability",),
    ),
    Mutant(
        name="gradient-without-temperature",
        file="megatron_rl/model/logprob/linear.py",
        line="at_logprob, at_entropy = grad_logprobs / head.temperature, grad_entropy / head.temperature",
        becomes="at_logprob, at_entropy = grad_logprobs, grad_entropy / head.temperature",
        fault="the gradient is that of temperature 1",
        tests=("tests/unit/model/test_linear_logprob.py::test_linear_equals_log_softmax_and_the_logits_path",),
    ),
    Mutant(
        name="entropy-not-shifted",
        file="megatron_rl/model/logprob/chunks.py",
        line="stats[1] += shift * stats[0]",
        becomes="",
        fault="tensor ranks add up parts of the entropy that are relative to different maxima",
        tests=("tests/unit/model/test_linear_logprob.py::test_linear_tp2_equals_tp1",),
    ),
    Mutant(
        name="hidden-gradient-summed-twice",
        file="megatron_rl/model/logprob/linear.py",
        line="if needs_hidden and head.reduce_hidden_grad and head.group is not None and hidden.shape[0]:",
        becomes="if needs_hidden and head.group is not None and hidden.shape[0]:",
        fault="under sequence parallelism the hidden state's gradient is summed here too",
        tests=(
            "tests/unit/model/test_linear_logprob.py::test_linear_tp2_leaves_the_sum_of_hiddens_gradient_to_the_caller",
        ),
    ),
    Mutant(
        name="gradient-in-main-grad-twice",
        file="megatron_rl/model/logprob/linear.py",
        line="parameter.grad_added_to_main_grad = True",
        becomes="",
        fault="Megatron-Core adds memory of any content to the output weight's gradient, which main_grad has already",
        tests=("tests/equality/test_main_grad.py::test_straight_into_main_grad_equals_through_autograd",),
    ),
)

TRAINED = (
    Mutant(
        name="version-moves-with-every-step",
        file="megatron_rl/backend/trainable_model.py",
        line="self.weight_version += int(outcome.applied)",
        becomes="self.weight_version += 1",
        fault="a step that moves nothing counts as a new version of the weights",
        tests=("tests/equality/test_steps.py::test_frozen_ghost_moves_nothing",),
    ),
    Mutant(
        name="sums-of-the-last-call",
        file="megatron_rl/backend/step_sums.py",
        line="self.values[:summed] += found[:, :summed].sum(0)",
        becomes="self.values[:summed] = found[:, :summed].sum(0)",
        fault="a step's loss is that of its last call alone",
        tests=("tests/equality/test_gradient.py::test_several_calls_before_one_step_add",),
    ),
    Mutant(
        name="merges-where-nothing-is-dropped",
        file="megatron_rl/backend/trainable_model.py",
        line='merge = skip.steps == "merge" and drops and skip.mode != "off"',
        becomes='merge = skip.steps == "merge"',
        fault="`skip.steps=merge` merges where nothing is dropped",
        tests=(
            "tests/unit/backend/test_trainable_model.py::test_a_plan_has_one_step_where_it_merges_and_one_per_mini_batch_elsewhere",
        ),
    ),
    Mutant(
        name="thrown-away-gradient-still-measured",
        file="megatron_rl/backend/trainable_model.py",
        line="self.schedule.forget_measured()",
        becomes="",
        fault="micro-batches whose gradient was thrown away move the fitted costs",
        tests=("tests/unit/backend/test_trainable_model.py::test_a_gradient_that_is_thrown_away_is_measured_nowhere",),
    ),
    Mutant(
        name="every-stage-measured-as-the-first",
        file="megatron_rl/backend/trainable_model.py",
        line="measured[self.topology.pipeline_rank] = measured_sums(self.schedule.take_laps())",
        becomes="measured[0] = measured_sums(self.schedule.take_laps())",
        fault="all stages' times are fitted as the first one's",
        tests=("tests/unit/backend/test_trainable_model.py::test_a_stages_laps_are_fitted_as_its_own",),
    ),
)

_REPLAYED = "tests/equality/test_routing_replay.py::test_replayed_experts_equal_the_plain_loop_with_experts_forced"
ROUTING = (
    Mutant(
        name="recomputed-by-the-latest",
        file="megatron_rl/model/routing_replay.py",
        line="return self.waiting.popleft() if self.waiting else None",
        becomes="return self.waiting.pop() if self.waiting else None",
        fault="recomputation replays the experts of the latest micro-batch, not of the oldest one under way",
        tests=(f"{_REPLAYED}[PP2-recompute qwen3_moe]",),
    ),
    Mutant(
        name="experts-of-the-first-slice",
        file="megatron_rl/backend/routed_rows.py",
        line="return positions[self.slice_rank * rows : (self.slice_rank + 1) * rows]",
        becomes="return positions[:rows]",
        fault="under sequence parallelism every rank replays the first one's experts",
        tests=(f"{_REPLAYED}[TP2-SP mixtral]",),
    ),
    Mutant(
        name="layers-counted-from-the-stage",
        file="megatron_rl/model/routing_replay.py",
        line="layers.append(router.layer_number - 1)",
        becomes="layers.append(len(layers))",
        fault="a later pipeline stage replays the experts of the first stage's layers",
        tests=(f"{_REPLAYED}[PP2 qwen3_moe]",),
    ),
)

RANKS = (*SCHEDULE, *OPTIMIZER, *PACKING, *LOGPROBS, *TRAINED, *ROUTING)
