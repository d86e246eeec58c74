"""Lists the faults planted in the numbers of the newer features: shared prompts, replayed experts, the planner's skip,
importance corrections and row-invariant log-probs."""

from __future__ import annotations

from mutants.table import Mutant

SHARED_PROMPTS = (
    Mutant(
        name="positions-behind-the-pads",
        file="megatron_rl/model/attention/layout.py",
        line="responses[slot] = lay(int(response_tokens[slot]), tokens)",
        becomes="responses[slot] = lay(int(response_tokens[slot]), -(-tokens // pad_multiple) * pad_multiple)",
        fault="a response's positions go on from its shared prompt's pads",
        tests=("tests/unit/model/test_window_spans.py::test_spans_are_the_mask",),
    ),
    Mutant(
        name="prompt-once-in-all-micro-batches",
        file="megatron_rl/planning/tokens.py",
        line="first = np.unique(np.stack([microbatch, run.group]), axis=1, return_index=True)[1]",
        becomes="first = np.unique(run.group, return_index=True)[1]",
        fault="a prompt that several micro-batches share is counted in the first of them alone",
        tests=("tests/unit/planning/test_spread.py::test_each_micro_batch_of_a_plan_counts_its_prompts_once",),
    ),
)

REPLAYED_EXPERTS = (
    Mutant(
        name="experts-of-the-last-that-knows",
        file="megatron_rl/backend/routed_rows.py",
        line="for slot in reversed(range(len(samples))):",
        becomes="for slot in range(len(samples)):",
        fault="a shared prompt's experts are those of its last sample, and not of the first",
        tests=(
            "tests/unit/backend/test_routed_rows.py::"
            "test_a_shared_prompts_rows_have_the_experts_of_the_first_sample_that_knows_them",
        ),
    ),
    Mutant(
        name="unknown-wipes-out-the-known",
        file="megatron_rl/backend/routed_rows.py",
        line="table[places] = np.where(known[..., None], experts, table[places])",
        becomes="table[places] = experts",
        fault="a sample that does not know the experts of its shared prompt wipes out what another one knows",
        tests=(
            "tests/unit/backend/test_routed_rows.py::"
            "test_a_shared_prompts_rows_have_the_experts_of_the_first_sample_that_knows_them",
        ),
    ),
)

SKIP = (
    Mutant(
        name="micro-batch-of-survivors-alone",
        file="megatron_rl/planning/plan.py",
        line="live = {row for rank in block for row, samples in enumerate(rank) if signal[samples].any()}",
        becomes="live = {row for rank in block for row, samples in enumerate(rank) if signal[samples].all()}",
        fault="without `plan.repack` a survivor is dropped with the neighbours that have no signal",
        tests=("tests/unit/planning/test_plan.py::test_invariants",),
    ),
    Mutant(
        name="experts-beside-another-row",
        file="megatron_rl/planning/plan.py",
        line="running += [[samples for row, samples in enumerate(rank) if row in live] for rank in block]",
        becomes="running += [[samples for samples in rank if signal[samples].any()] for rank in block]",
        fault="without `plan.repack` ranks that share experts run other micro-batches side by side than the dense run",
        tests=("tests/unit/planning/test_plan_lockstep.py::test_survivors_on_one_rank_only[1]",),
    ),
    Mutant(
        name="dense-without-its-fillers",
        file="megatron_rl/planning/plan.py",
        line="return _assemble(members, running, costs.tokens.whole, rules, "
        "num_dense=int(_lockstep_counts(dense, rules).sum()))",
        becomes="return _assemble(members, running, costs.tokens.whole, rules, num_dense=sum(map(len, dense)))",
        fault="what the skip saves is counted against a dense run without the fillers that lockstep asks of it",
        tests=("tests/unit/planning/test_plan_lockstep.py::test_dense_run_gets_fillers_too",),
    ),
)

CORRECTIONS = (
    Mutant(
        name="weights-of-its-own-rank",
        file="megatron_rl/trainer/corrections.py",
        line="weights = collectives.broadcast_from_rank0(importance.weights)",
        becomes="weights = importance.weights",
        fault="each rank decides by its own importance weights, which another CPU rounds otherwise",
        tests=("tests/unit/algorithm/test_importance.py::test_every_rank_takes_rank_0s_weights_and_decides_by_them",),
    ),
    Mutant(
        name="shares-of-what-is-left",
        file="megatron_rl/trainer/corrections.py",
        line="**correction_metrics(importance, mask, lengths, signal),",
        becomes="**correction_metrics(importance, mask, lengths, left),",
        fault="`correction/masked_share` leaves out the samples that are masked whole",
        tests=(
            "tests/unit/algorithm/test_importance.py::"
            "test_the_shares_of_a_rollout_count_the_samples_that_its_weights_mask",
        ),
    ),
)

ROW_INVARIANT = (
    Mutant(
        name="entropy-relative-to-its-rank",
        file="megatron_rl/model/logprob/row_invariant.py",
        line="total += torch.stack([stats[0] * factor, (stats[1] + shift * stats[0]) * factor, stats[2]])",
        becomes="total += torch.stack([stats[0] * factor, stats[1] * factor, stats[2]])",
        fault="under `rollout.bitwise` tensor ranks add up parts of the entropy that are relative to different maxima",
        tests=(
            "tests/unit/model/test_invariant.py::test_entropies_of_several_ranks_equal_those_of_the_whole_vocabulary",
        ),
    ),
    Mutant(
        name="masked-logits-are-nan",
        file="megatron_rl/model/logprob/row_invariant.py",
        line="stats[1] = e.mul_(x.clamp_(min=UNDERFLOW)).sum(-1)[:count]",
        becomes="stats[1] = e.mul_(x).sum(-1)[:count]",
        fault="under `rollout.bitwise` a masked logit makes its row's entropy NaN",
        tests=("tests/unit/model/test_invariant.py::test_masked_logits_take_no_probability_and_no_nan",),
    ),
)

REPEATS = (
    Mutant(
        name="equal-whatever-their-advantage",
        file="megatron_rl/algorithm/repeats.py",
        line="key = int(facts.groups[sample]), int(facts.sample_keys[sample]), own",
        becomes='key = int(facts.groups[sample]), int(facts.sample_keys[sample]), b""',
        fault="a sample counts for others of equal tokens and another advantage, as noise gives them",
        tests=("tests/unit/algorithm/test_repeats.py",),
    ),
    Mutant(
        name="counts-once-for-all",
        file="megatron_rl/algorithm/repeats.py",
        line="return np.bincount(stand_in[signal], minlength=len(stand_in))",
        becomes="return signal & (stand_in == np.arange(len(stand_in)))",
        fault="of equal samples one runs, and the loss has lost the others",
        tests=("tests/unit/algorithm/test_repeats.py",),
    ),
)

MASTERS = (
    Mutant(
        name="masters-begin-rounded",
        file="megatron_rl/backend/masters.py",
        line="master.copy_(values.reshape(-1)[held].view_as(master))",
        becomes="master.copy_(parameter.reshape(-1)[held].view_as(master))",
        fault="masters begin at the bfloat16 weights, whatever the files hold",
        tests=("tests/equality/test_masters.py::test_masters_begin_at_the_files_numbers[EP2-sharded qwen3_moe]",),
    ),
    Mutant(
        name="masters-rounded-at-a-reset",
        file="megatron_rl/backend/trainable_model.py",
        line="optimizer.masters.take(self.optimizer.masters)",
        becomes="optimizer.masters.take(optimizer.masters)",
        fault="the supervised start loses what its steps moved below bfloat16's places",
        tests=("tests/equality/test_masters.py::test_masters_begin_at_the_files_numbers[EP2-sharded qwen3_moe]",),
    ),
    Mutant(
        name="no-masters-before-a-step",
        file="megatron_rl/checkpoint/model_state.py",
        line='if saved["optimizer_steps"] or saved.get("has_masters", False):',
        becomes='if saved["optimizer_steps"]:',
        fault="a run that goes on from before its first step begins with rounded masters",
        tests=("tests/equality/test_masters.py::test_a_checkpoint_before_the_first_step_has_the_masters",),
    ),
    Mutant(
        name="spread-where-there-is-no-master",
        file="megatron_rl/weights/export.py",
        line="given = reader if parameter.dtype == torch.float32 else halves",
        becomes="given = halves",
        fault="optimizer.spread_masters moves a mixture's float32 router biases",
        tests=(
            "tests/equality/test_masters.py::test_spread_masters_are_the_same_in_every_layout[EP2-sharded glm4_moe]",
        ),
    ),
    Mutant(
        name="spread-by-the-place-in-the-slice",
        file="megatron_rl/weights/spread.py",
        line="first_row = start if dimension == 0 else 0",
        becomes="first_row = 0",
        fault="spread masters depend on the number of tensor ranks",
        tests=("tests/unit/weights/test_spread.py::test_a_slice_is_that_of_the_whole",),
    ),
)

NEWER_NUMBERS = (*SHARED_PROMPTS, *REPLAYED_EXPERTS, *SKIP, *CORRECTIONS, *ROW_INVARIANT, *REPEATS, *MASTERS)
