"""Lists the faults planted in the planner and in its cost model."""

from __future__ import annotations

from mutants.table import Mutant

PLAN = (
    Mutant(
        name="plan-cap-one-too-large",
        file="megatron_rl/planning/plan.py",
        line="if all(len(b) == 1 or costs.tokens.total(b)[0] <= rules.max_tokens for b in bins):",
        becomes="if all(len(b) == 1 or costs.tokens.total(b)[0] <= rules.max_tokens + 1 for b in bins):",
        fault="a micro-batch may hold one token above the cap",
        tests=("tests/unit/planning/test_plan.py::test_no_microbatch_exceeds_the_token_cap",),
    ),
    Mutant(
        name="cap-of-the-rules-one-too-large",
        file="megatron_rl/planning/plan.py",
        line="row_multiple, max_tokens = 1, settings.max_tokens_per_microbatch",
        becomes="row_multiple, max_tokens = 1, settings.max_tokens_per_microbatch + 1",
        fault="the planner is given one token more than `plan.max_tokens_per_microbatch`",
        tests=("tests/unit/planning/test_plan_rules.py::test_rules_of_a_run_are_its_settings",),
    ),
    Mutant(
        name="long-sample-at-the-cap",
        file="megatron_rl/planning/plan.py",
        line="above = members[padded[members] > rules.max_tokens]",
        becomes="above = members[padded[members] >= rules.max_tokens]",
        fault="a sample of exactly the cap's tokens is refused",
        tests=("tests/unit/planning/test_plan.py::test_long_sample_error_names_the_sample_and_the_way_out",),
    ),
    Mutant(
        name="pads-one-multiple-too-many",
        file="megatron_rl/planning/tokens.py",
        line="return -(-lengths // pad_multiple) * pad_multiple",
        becomes="return (lengths // pad_multiple + 1) * pad_multiple",
        fault="a length that is a multiple already is padded by another",
        tests=("tests/unit/planning/test_plan.py::test_padded_lengths_equal_a_loop",),
    ),
    Mutant(
        name="filler-is-the-longest",
        file="megatron_rl/planning/plan.py",
        line="shortest = among[[np.argmin(padded[among])]] if len(run) else run",
        becomes="shortest = among[[np.argmax(padded[among])]] if len(run) else run",
        fault="fillers run the longest sample",
        tests=("tests/unit/planning/test_plan_lockstep.py", "tests/unit/planning/test_plan.py::test_invariants"),
    ),
    Mutant(
        name="lockstep-of-the-shortest-rank",
        file="megatron_rl/planning/plan.py",
        line="return np.repeat([_rounded_up(most, rules) for most in counts.max(axis=1).tolist()], "
        "rules.lockstep_ranks)",
        becomes="return np.repeat([_rounded_up(most, rules) for most in counts.min(axis=1).tolist()], "
        "rules.lockstep_ranks)",
        fault="a block of ranks runs as few micro-batches as its least loaded one",
        tests=("tests/unit/planning/test_plan_lockstep.py",),
    ),
    Mutant(
        name="fillers-train",
        file="megatron_rl/planning/plan.py",
        line="filler = [i >= len(rank) for rank, even in zip(per_rank, evened, strict=True) for i in range(len(even))]",
        becomes="filler = [i > len(rank) for rank, even in zip(per_rank, evened, strict=True) for i in "
        "range(len(even))]",
        fault="a rank's first filler is trained as a sample of its own",
        tests=("tests/unit/planning/test_plan_lockstep.py",),
    ),
    Mutant(
        name="plan-drops-without-leave",
        file="megatron_rl/planning/plan.py",
        line="live = members[signal[members]] if drops else members",
        becomes="live = members[signal[members]]",
        fault="samples are dropped where nothing may be dropped",
        tests=("tests/unit/planning/test_plan.py::test_invariants",),
    ),
    Mutant(
        name="layers-of-all-stages",
        file="megatron_rl/planning/cost.py",
        line="per_stage = sum(count for _, count, _ in rank_shares) / len(rank_shares)",
        becomes="per_stage = sum(count for _, count, _ in rank_shares)",
        fault="the LM head's cost is weighed against the layers of every stage",
        tests=("tests/unit/planning/test_plan_rules.py::test_rules_of_a_run_are_its_settings",),
    ),
    Mutant(
        name="balanced-without-the-head",
        file="megatron_rl/planning/pipeline_layout.py",
        line="needed, held = 1, head",
        becomes="needed, held = 1, 0",
        fault="the stages are balanced as if the last one held no LM head",
        tests=("tests/unit/planning/test_pipeline_layout.py::test_no_other_layout_balances_better",),
    ),
    Mutant(
        name="chunks-balanced-one-by-one",
        file="megatron_rl/planning/pipeline_layout.py",
        line="if found >= best:",
        becomes="if found <= best:",
        fault="of the interleaved schedule each chunk is balanced, and not what a rank has of them together",
        tests=("tests/unit/planning/test_pipeline_layout.py::test_chunks_are_balanced_by_rank",),
    ),
    Mutant(
        name="stages-as-if-even",
        file="megatron_rl/weights/model_shape.py",
        line="first = sum(counts[:stage])",
        becomes="first = counts[stage] * stage",
        fault="a stage of an uneven pipeline has the layers of another one",
        tests=(
            "tests/equality/test_uneven_pipeline.py::test_a_released_model_lies_on_stages_as_the_forecast_says",
            "tests/equality/test_uneven_pipeline.py::test_every_layout_equals_one_process",
        ),
    ),
)

COST = (
    Mutant(
        name="bubble-without-chunks",
        file="megatron_rl/planning/cost.py",
        line="return float(totals[slowest] + (longest.sum() - longest[slowest]) / self.virtual)",
        becomes="return float(totals[slowest] + (longest.sum() - longest[slowest]))",
        fault="the bubble is not divided by the interleaved chunks",
        tests=("tests/unit/planning/test_cost.py::test_rank_seconds_equals_the_clock_for_equal_microbatches",),
    ),
    Mutant(
        name="fit-never-forgets",
        file="megatron_rl/planning/cost.py",
        line="self.sums = self.forget * self.sums + step",
        becomes="self.sums = self.sums + step",
        fault="measurements of long ago weigh as much as the last ones",
        tests=("tests/unit/planning/test_cost.py::test_older_steps_weigh_less_and_a_ghost_forgets_nothing",),
    ),
    Mutant(
        name="backward-for-nothing",
        file="megatron_rl/planning/cost.py",
        line="both = 1.0 + row[10] / max(row[9], 1e-300)",
        becomes="both = 1.0",
        fault="fitted costs leave the backward pass out",
        tests=("tests/unit/planning/test_cost.py::test_the_priors_own_proportions_are_found_again",),
    ),
    Mutant(
        name="fitted-by-one-stage",
        file="megatron_rl/planning/cost.py",
        line="return bool((self.sums[:, 0] > 0).all())",
        becomes="return bool((self.sums[:, 0] > 0).any())",
        fault="a fit is believed before every stage was measured",
        tests=("tests/unit/planning/test_cost.py::test_without_measurements_the_prior_stands",),
    ),
    Mutant(
        name="head-of-one-layer",
        file="megatron_rl/planning/cost.py",
        line="token=max(share + head, LEAST_LAYERS) / per_stage,",
        becomes="token=max(share, LEAST_LAYERS) / per_stage + head,",
        fault="the prior of the LM head's cost is not over the layers of its stage",
        tests=("tests/unit/planning/test_plan_rules.py::test_rules_of_a_run_are_its_settings",),
    ),
    Mutant(
        name="seconds-of-the-quickest-rank",
        file="megatron_rl/planning/cost.py",
        line="return max(model.rank_seconds(tokens[a:b], squares[a:b]) for a, b in zip(bounds[:-1], bounds[1:], "
        "strict=True))",
        becomes="return min(model.rank_seconds(tokens[a:b], squares[a:b]) for a, b in zip(bounds[:-1], bounds[1:], "
        "strict=True))",
        fault="a mini-batch is predicted to take as long as its least loaded rank",
        tests=("tests/unit/planning/test_cost.py::test_a_mini_batch_takes_as_long_as_its_slowest_rank",),
    ),
)

PLANS = (*PLAN, *COST)
