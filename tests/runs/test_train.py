"""The whole loop through its command line: runs end to end, bad input in a clear error, skips that change nothing."""

import pytest
from safetensors.torch import load_file

from tests.pairwise import quick
from tests.runs.command import apart, assert_same_run, firsts_of, rows_of, same_tensors, weights_of, without_orphans
from tests.workers.inputs import prepare_family, prepare_gpt_oss

NAMED = {
    *("skip/zero_advantage_ratio", "skip/samples_dropped", "skip/tokens_dropped", "skip/microbatches_dropped"),
    *("skip/silent_ranks", "skip/ghost_steps", "skip/speedup_ideal", "time/rollout_s", "time/reward_s"),
    *("time/logprob_s", "time/update_s", "time/weight_sync_s", "train/loss", "train/grad_norm", "train/entropy"),
    *("train/clip_ratio", "train/lr", "reward/mean", "eval/test/mean@1", "perf/dense_equivalent_tokens_per_second"),
    "reward/tests.reward_functions:parity",
}
LAYOUTS = ["parallel.pipeline=2", "parallel.tensor=2", "parallel.pipeline=1", "parallel.context=2"]
FUNCTIONS = ("reward.functions=[tests.reward_functions:parity,math_verify]", "reward.weights=[1.0,0.5]",
             "reward.on_error=zero")
# long enough that samples lie on both ranks, and trained twice, so that the ratio is not 1
LONG = ("parallel.context=2", "rollout.max_response_tokens=24", "train.epochs_per_rollout=2", "optimizer.lr=1e-2",
        "train.num_rollouts=1")
SEVENS = ("reward.functions=[tests.reward_functions:explode_on_seven]", "train.prompts_per_rollout=60")


def test_a_run_leaves_its_pinned_files_and_names(made, arithmetic, tmp_path):
    evaluation = [f"eval.path={arithmetic / 'test.jsonl'}", "eval.every_rollouts=1"]
    extra = ["parallel.pipeline=2", "sft.steps=3", "sft.samples_per_step=8", "train.epochs_per_rollout=2", *evaluation]
    said, _ = made.into(tmp_path, 2, *extra)
    assert "passed for its old log-probs, the first step's too: train.epochs_per_rollout=2" in said
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 3 + 2 * 2 * 2 + 1))  # and rollouts x epochs x mini-batches
    assert [row["phase"] for row in rows] == ["warmup"] * 3 + ["rl"] * 8
    assert not NAMED - {name for row in rows for name in row}
    assert "report.html" in said and 'id="report"' in (tmp_path / "report.html").read_text()
    assert (tmp_path / "config.yaml").exists()
    assert rows[3]["train/logprob_gap_max"] < 1e-4  # float32, the same weights in two implementations


@pytest.mark.parametrize("layout", quick(LAYOUTS, "parallel.pipeline=2"))
def test_skip_run_ends_with_the_dense_runs_weights(made, layout):
    """They are the same bitwise, and so are the rollouts, sampling included; nothing is repacked."""
    fixed = ("plan.repack=false", "plan.samples_per_microbatch=2")
    exact, off = (made(2, layout, f"skip.mode={mode}", *fixed) for mode in ("exact", "off"))
    dropped, none = (sum(row["skip/samples_dropped"] for row in rows_of(run)) for run in (exact, off))
    assert dropped > 0 == none and same_tensors(weights_of(exact), weights_of(off))


def test_another_layout_trains_the_same_run(made):
    """Seeds hold no rank: one process, PP=2 and DP=2 end with the same weights, rounding apart."""
    # AdamW amplifies the summation order where gradients are near zero; 4 steps at lr 1e-4.
    assert apart(made(1), made(2, "parallel.pipeline=2")) < 1e-5 and apart(made(1), made(2)) < 1e-5


def test_shared_prompts_and_passes_left_out_train_the_same_run(made):
    """A run whose prompts run once, without a needless pass, is the run that does without either, rounding apart."""
    before = made(2, "parallel.pipeline=2", "plan.share_prompts=false", "correction.old_logprobs=recompute")
    after = made(2, "parallel.pipeline=2")
    assert apart(before, after) < 1e-5
    rows, others = rows_of(after), rows_of(before)
    assert [row["step_kind"] for row in rows] == [row["step_kind"] for row in others]
    assert sum(row["tokens/shared"] for row in rows) > 0
    # The trainer's own engine: both gaps are rounding (test_own_logprobs compares gaps that are not).
    assert all(0 < each[0]["train/logprob_gap_mean"] < 1e-5 for each in (rows, others))


def test_own_parts_train_the_run_of_the_built_in_ones(made):
    """GSPO and Dr. GRPO, written as a user would, over two context ranks: sums of samples are completed over both."""
    own = made(2, *LONG, "loss.policy=tests.own_parts:by_sequence", "advantage.estimator=tests.own_parts:centred")
    built_in = made(2, *LONG, "loss.policy=gspo", "advantage.estimator=dr_grpo")
    assert same_tensors(weights_of(own), weights_of(built_in))
    for name in ("train/loss", "train/ratio", "train/clip_ratio", "skip/samples_dropped"):
        assert [row.get(name) for row in rows_of(own)] == [row.get(name) for row in rows_of(built_in)]
    assert sum(row["skip/samples_dropped"] for row in rows_of(own)) > 0


def test_a_run_with_workers_equals_one_without(made):
    """A run with reward workers equals one without, to the bit, and leaves no worker."""
    plain, helped = (made(1, *FUNCTIONS, f"reward.num_workers={count}", run=without_orphans) for count in (0, 1))
    assert_same_run(plain, helped)
    assert "reward/math_verify" in rows_of(helped)[0]


def trains_on_two_what_one_trains(made, inputs, alone: tuple[str, ...], two: tuple[str, ...]):
    """Check that a model trains the same run on two processes and on one, with its engine's log-probs, and is exported
    as it came; return the run's folder on two processes.
    """
    model = f"model.hf_path={inputs / 'model'}"
    runs = made(1, model, *alone), made(2, model, *two)
    assert apart(*runs) < 1e-5
    gaps = [row["train/logprob_gap_max"] for run in runs for row in firsts_of(run, "train/logprob_gap_max")]
    assert max(gaps) < 1e-4, gaps
    first, last = load_file(inputs / "model" / "model.safetensors"), weights_of(runs[1])
    assert {name: x.shape for name, x in first.items()} == {name: x.shape for name, x in last.items()}
    assert not same_tensors(first, last)
    return runs[1]


@pytest.mark.parametrize("layout", quick(["parallel.expert=2", "parallel.context=2"], "parallel.expert=2"))
def test_a_mixture_trains_the_same_run(made, mixture, layout):
    """The run of a mixture has sampling, rewards, skips, weight sync and export."""
    trains_on_two_what_one_trains(made, mixture, (), (layout,))


def test_experts_stacked_in_files_train_the_same_run(made, arithmetic, tmp_path):
    """gpt-oss, with the engine's own experts replayed, is exported with a layer's experts stacked in one tensor."""
    inputs, replayed = prepare_gpt_oss(arithmetic, tmp_path / "inputs"), "rollout.routing_replay=rollout"
    run = trains_on_two_what_one_trains(made, inputs, (replayed,), (replayed, "parallel.expert=2"))
    assert rows_of(run)[0]["train/rerouted_token_share"] == 0.0


@pytest.mark.parametrize("family", quick(["phi3", "olmo2", "olmo3", "gemma3_text"], "phi3", "olmo3"))
def test_a_family_of_other_tensors_trains_the_same_run(made, arithmetic, tmp_path, family):
    """A run over two tensor ranks is the run on one, and its engine has the trainer's log-probs after every sync."""
    inputs = prepare_family(arithmetic, tmp_path / "inputs", family)
    trains_on_two_what_one_trains(made, inputs, (), ("parallel.tensor=2",))


def test_a_run_without_signal_is_ghosts_and_freeze_moves_nothing(made, arithmetic, tmp_path):
    constant = "reward.functions=[tests.reward_functions:constant]"
    (said,) = made.into(tmp_path, 1, constant, "skip.ghost=freeze", "metrics.dense_every_rollouts=1")
    assert "WARNING: all 4 optimizer steps trained nothing (4 ghosts)" in said
    rows = rows_of(tmp_path)
    assert {row["step_kind"] for row in rows} == {"GHOST"} and rows[-1]["weight_version"] == 0
    assert rows[0]["skip/zero_advantage_ratio"] == 1.0 and 0 < rows[0]["logprob/coverage"] < 1
    assert same_tensors(weights_of(tmp_path), load_file(arithmetic / "model" / "model.safetensors"))


def test_kl_and_entropy_train_under_approximate(made):
    terms = ("loss.kl_coefficient=0.1", "loss.entropy_coefficient=0.01", "loss.kl_estimator=unbiased")
    real = [row for row in rows_of(made(1, "skip.mode=approximate", *terms)) if row["step_kind"] == "REAL"]
    assert abs(real[0]["train/kl"]) < 1e-5 and real[-1]["train/kl"] > 0  # the reference is where the run began


@pytest.mark.parametrize(
    ("setting", "steps"), [("correction.old_logprobs=rollout", 4), ("skip.steps=merge", 2), ("model.dtype=bfloat16", 4)]
)
def test_other_settings_run(made, setting, steps):
    assert len(rows_of(made(1, setting))) == steps


def test_tensor_parallel_that_does_not_divide_the_heads(made, tmp_path):
    said = "".join(made.into(tmp_path, 3, "parallel.tensor=3", code=2))
    assert said.count("parallel.tensor=3 does not divide num_attention_heads=2") == 1, said  # one rank says it


def test_a_reward_that_raises_stops_every_rank_with_the_samples_id_and_traceback(made, tmp_path):
    said = "".join(made.into(tmp_path, 2, *SEVENS, code=1))
    assert "no reward for 7" in said and "Traceback" in said and "@0#" in said, said


@pytest.mark.parametrize("policy", quick(["drop", "zero"], "drop"))
def test_a_reward_that_raises_costs_only_its_sample(made, policy):
    row = rows_of(made(2, *SEVENS, f"reward.on_error={policy}", "train.num_rollouts=1"))[0]
    errors, excluded = row["reward/errors"], row["reward/excluded"]
    assert errors > 0 and errors % 4 == 0  # a prompt's four fail together
    assert excluded == (errors if policy == "drop" else 0) and row["reward/error_share"] == errors / 240


def test_a_reward_that_always_raises_ends_the_run_and_stands_in_the_log(made, tmp_path):
    broken = ("reward.functions=[tests.reward_functions:broken]", "reward.on_error=zero")
    for said in made.into(tmp_path, 2, *broken, code=1):
        assert "the reward of all 32 samples failed" in said and "NameError: name 'undefined_name' is" in said, said


def test_an_infinite_reward_is_refused_before_it_becomes_nan(made):
    made.refused(["inf"], "reward.functions=[tests.reward_functions:infinite]", code=1)


def test_an_overflow_on_the_way_to_an_advantage_ends_every_rank_alike(made, tmp_path):
    """A reward over an infinite spread is 0: every step was a ghost, with exit 0."""
    twice = ("reward.functions=[tests.reward_functions:huge]", "reward.weights=[2]")
    for said in made.into(tmp_path, 2, *twice, code=1):
        # a rank may also be ended by its peer's report of the same error
        (line,) = [line for line in said.splitlines() if "the reward of sample " in line]
        words = ("@0#", "6e+38, beyond float32's 3.4e+38", "reward.weights")
        assert line.startswith("megatron_rl: ") and all(word in line for word in words), said
        assert "Traceback" not in said
