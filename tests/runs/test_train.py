"""The whole loop through its command line.

Runs go end to end, bad input ends in a clear error, and the skip changes nothing.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.runs.command import arguments, command_line, rows_of, weights_of
from tests.workers.inputs import prepare_family, prepare_gpt_oss


def test_a_run_leaves_its_pinned_files_and_names(pool, arithmetic, tmp_path):
    evaluation = [f"eval.path={arithmetic / 'test.jsonl'}", "eval.every_rollouts=1"]
    extra = ["parallel.pipeline=2", "sft.steps=3", "train.epochs_per_rollout=2", *evaluation]
    results = pool.run(2, command_line, arguments(arithmetic, tmp_path, *extra), timeout_s=120)
    assert [code for code, _ in results] == [0, 0], results
    assert "passed for its old log-probs, the first step's too: train.epochs_per_rollout=2" in results[0][1]
    rows = rows_of(tmp_path)
    # warm-up, then rollouts x epochs x mini-batches
    assert [row["step"] for row in rows] == list(range(1, 3 + 2 * 2 * 2 + 1))
    assert [row["phase"] for row in rows] == ["warmup"] * 3 + ["rl"] * 8
    named = {name for row in rows for name in row}
    wanted = (
        "skip/zero_advantage_ratio skip/samples_dropped skip/tokens_dropped skip/microbatches_dropped skip/silent_ranks"
    )
    wanted += (
        " skip/ghost_steps skip/speedup_ideal time/rollout_s time/reward_s time/logprob_s time/update_s "
        "time/weight_sync_s"
    )
    wanted += " train/loss train/grad_norm train/entropy train/clip_ratio train/lr reward/mean eval/test/mean@1"
    wanted += " perf/dense_equivalent_tokens_per_second reward/tests.reward_functions:parity"
    assert set(wanted.split()) <= named, set(wanted.split()) - named
    assert "report.html" in {p.name for p in tmp_path.iterdir()} and (tmp_path / "config.yaml").exists()
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert rows[3]["train/logprob_gap_max"] < 1e-4  # float32, the same weights in two implementations


@pytest.mark.parametrize(
    "layout", ["parallel.pipeline=2", "parallel.tensor=2", "parallel.pipeline=1", "parallel.context=2"]
)
def test_skip_run_ends_with_the_dense_runs_weights(pool, arithmetic, tmp_path, layout):
    """A skip run ends with the dense run's weights, bitwise, and so do its rollouts.

    It takes two rollouts and four optimizer steps, sampling included; nothing is repacked.
    """
    weights = {}
    for mode in ("exact", "off"):
        given = arguments(
            arithmetic,
            tmp_path / mode,
            layout,
            f"skip.mode={mode}",
            "plan.repack=false",
            "plan.samples_per_microbatch=2",
        )
        results = pool.run(2, command_line, given, timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
        weights[mode] = weights_of(tmp_path / mode)
    dropped = sum(row["skip/samples_dropped"] for row in rows_of(tmp_path / "exact"))
    assert dropped > 0 and sum(row["skip/samples_dropped"] for row in rows_of(tmp_path / "off")) == 0
    assert all(torch.equal(weights["exact"][name], weights["off"][name]) for name in weights["off"])


def test_another_layout_trains_the_same_run(pool, arithmetic, tmp_path):
    """Another layout trains the same run, as seeds hold no rank.

    One process, PP=2 and DP=2 draw the same rollouts and end with the same weights (rounding apart).
    """
    weights = []
    for world, layout in ((1, "parallel.pipeline=1"), (2, "parallel.pipeline=2"), (2, "parallel.pipeline=1")):
        run_dir = tmp_path / f"{world}{layout[-1]}"
        results = pool.run(world, command_line, arguments(arithmetic, run_dir, layout), timeout_s=120)
        assert [code for code, _ in results] == [0] * world, results
        weights.append(torch.cat([x.flatten() for x in weights_of(run_dir).values()]))
    for other in weights[1:]:
        # AdamW amplifies the summation order where gradients are near zero; 4 steps at lr 1e-4.
        assert (other - weights[0]).norm() / weights[0].norm() < 1e-5


def test_shared_prompts_and_passes_left_out_train_the_same_run(pool, arithmetic, tmp_path):
    """A run whose prompts run once, without a needless pass, is the run that does without either, rounding apart."""
    ways = {
        "before": ("plan.share_prompts=false", "correction.old_logprobs=recompute"),
        "after": ("plan.share_prompts=true", "correction.old_logprobs=auto"),
    }
    weights, rows = {}, {}
    for name, settings in ways.items():
        given = arguments(arithmetic, tmp_path / name, "parallel.pipeline=2", "train.epochs_per_rollout=1", *settings)
        results = pool.run(2, command_line, given, timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
        weights[name] = torch.cat([x.flatten() for x in weights_of(tmp_path / name).values()])
        rows[name] = rows_of(tmp_path / name)
    assert (weights["after"] - weights["before"]).norm() / weights["before"].norm() < 1e-5
    assert [row["step_kind"] for row in rows["after"]] == [row["step_kind"] for row in rows["before"]]
    assert sum(row["tokens/shared"] for row in rows["after"]) > 0
    # The trainer's own engine: both gaps are rounding (test_own_logprobs compares gaps that are not).
    assert all(0 < rows[name][0]["train/logprob_gap_mean"] < 1e-5 for name in ways)


@pytest.mark.parametrize("layout", ["parallel.expert=2", pytest.param("parallel.context=2", marks=pytest.mark.long)])
def test_a_mixture_trains_the_same_run(pool, mixture, tmp_path, layout):
    """A mixture split over two processes trains the same run as on one.

    The run has sampling, rewards, skips, weight sync and export.
    """
    weights, gaps = [], []
    for world, given in ((1, "parallel.pipeline=1"), (2, layout)):
        run_dir = tmp_path / str(world)
        results = pool.run(world, command_line, arguments(mixture, run_dir, given), timeout_s=120)
        assert [code for code, _ in results] == [0] * world, results
        weights.append(weights_of(run_dir))
        gaps += [row["train/logprob_gap_max"] for row in rows_of(run_dir) if "train/logprob_gap_max" in row]
    assert set(weights[0]) == set(load_file(mixture / "model" / "model.safetensors")) == set(weights[1])
    one, two = (torch.cat([w[name].flatten() for name in sorted(w)]) for w in weights)
    assert (two - one).norm() / one.norm() < 1e-5 and max(gaps) < 1e-4, gaps


def test_experts_stacked_in_files_train_the_same_run(pool, arithmetic, tmp_path):
    """gpt-oss over two expert ranks is the run on one process, with the engine's own experts replayed.

    Its export is what transformers writes: the experts of a layer stacked in one tensor.
    """
    folder, weights = prepare_gpt_oss(arithmetic, tmp_path / "inputs"), []
    for world in (1, 2):
        run_dir, given = tmp_path / str(world), (f"parallel.expert={world}", "rollout.routing_replay=rollout")
        results = pool.run(world, command_line, arguments(folder, run_dir, *given), timeout_s=120)
        assert [code for code, _ in results] == [0] * world, results
        weights.append(weights_of(run_dir))
        rows = rows_of(run_dir)
        assert max(row["train/logprob_gap_max"] for row in rows if "train/logprob_gap_max" in row) < 1e-4
        assert rows[0]["train/rerouted_token_share"] == 0.0
    first = load_file(folder / "model" / "model.safetensors")
    assert {k: x.shape for k, x in weights[0].items()} == {k: x.shape for k, x in first.items()}
    assert any(not torch.equal(weights[0][name], first[name]) for name in first)
    one, two = (torch.cat([w[name].flatten() for name in sorted(w)]) for w in weights)
    assert (two - one).norm() / one.norm() < 1e-5


@pytest.mark.parametrize("family", ["phi3", "olmo2", "olmo3", "gemma3_text"])
def test_a_family_of_other_tensors_trains_the_same_run(pool, arithmetic, tmp_path, family):
    """A run over two tensor ranks is the run on one, and its engine has the trainer's log-probs after every sync."""
    folder = prepare_family(arithmetic, tmp_path / "inputs", family)
    weights, gaps = [], []
    for world, given in ((1, "parallel.tensor=1"), (2, "parallel.tensor=2")):
        run_dir = tmp_path / str(world)
        results = pool.run(world, command_line, arguments(folder, run_dir, given), timeout_s=120)
        assert [code for code, _ in results] == [0] * world, results
        weights.append(weights_of(run_dir))
        gaps += [row["train/logprob_gap_max"] for row in rows_of(run_dir) if "train/logprob_gap_max" in row]
    first = load_file(folder / "model" / "model.safetensors")
    assert set(weights[0]) == set(first) == set(weights[1])
    assert any(not torch.equal(weights[0][name], first[name]) for name in first)
    one, two = (torch.cat([w[name].flatten() for name in sorted(w)]) for w in weights)
    assert (two - one).norm() / one.norm() < 1e-5 and max(gaps) < 1e-4, gaps


def test_a_run_without_signal_is_ghosts_and_freeze_moves_nothing(pool, arithmetic, tmp_path):
    extra = [
        "reward.functions=[tests.reward_functions:constant]",
        "skip.ghost=freeze",
        "metrics.dense_every_rollouts=1",
    ]
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *extra), timeout_s=60)
    assert code == 0, said
    assert "WARNING: all 4 optimizer steps trained nothing (4 ghosts)" in said
    rows = rows_of(tmp_path)
    assert {row["step_kind"] for row in rows} == {"GHOST"} and rows[-1]["weight_version"] == 0
    assert rows[0]["skip/zero_advantage_ratio"] == 1.0 and 0 < rows[0]["logprob/coverage"] < 1
    trained, given = weights_of(tmp_path), load_file(arithmetic / "model" / "model.safetensors")
    assert all(torch.equal(trained[name], given[name]) for name in trained)


def test_kl_and_entropy_train_under_approximate(pool, arithmetic, tmp_path):
    extra = [
        "skip.mode=approximate",
        "loss.kl_coefficient=0.1",
        "loss.entropy_coefficient=0.01",
        "loss.kl_estimator=unbiased",
    ]
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *extra), timeout_s=60)
    assert code == 0, said
    rows = rows_of(tmp_path)
    real = [row for row in rows if row["step_kind"] == "REAL"]
    assert abs(real[0]["train/kl"]) < 1e-5 and real[-1]["train/kl"] > 0  # the reference is where the run began


@pytest.mark.parametrize("setting", ["correction.old_logprobs=rollout", "skip.steps=merge", "model.dtype=bfloat16"])
def test_other_settings_run(pool, arithmetic, tmp_path, setting):
    given = arguments(arithmetic, tmp_path, setting)
    ((code, said),) = pool.run(1, command_line, given, timeout_s=60)
    assert code == 0, said
    assert len(rows_of(tmp_path)) == (2 if setting == "skip.steps=merge" else 4)


BAD_INPUT = {
    "unknown key": (["train.num_rolouts=3"], ["train.num_rolouts", "nearest known key is train.num_rollouts"]),
    "near an old key": (["train.stpes=3"], ["train.stpes", "nearest known key is train.num_rollouts"]),
    "unknown megatron field": (
        ["megatron.transformer.recompute_granularty=full"],
        ["recompute_granularty", "recompute_granularity"],
    ),
    "the seam's field": (
        ["megatron.transformer.calculate_per_token_loss=false"],
        ["calculate_per_token_loss", "token-sum seam"],
    ),
    "kl under exact": (
        ["loss.kl_coefficient=0.1"],
        ["loss.kl_coefficient=0.1", "skip.mode=approximate", "skip.mode=off"],
    ),
    "entropy under exact": (
        ["loss.entropy_coefficient=0.1"],
        ["loss.entropy_coefficient=0.1", "skip.mode=approximate"],
    ),
    "no such model": (["model.hf_path=nowhere"], ["model.hf_path", "nowhere", "config.json"]),
    "no such data": (["data.train=nowhere.jsonl"], ["data.train", "nowhere.jsonl"]),
    "one sample per prompt": (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt=1", "at least 2"]),
    "longer than the context": (["rollout.max_response_tokens=60"], ["76", "64", "lower one"]),
    "world not divided": (["parallel.pipeline=2"], ["world size 1", "parallel.pipeline=2"]),
    "no such reward": (["reward.functions=[arithmatic]"], ["arithmatic", "arithmetic"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_settings_are_named_with_their_value_and_the_way_out(pool, arithmetic, tmp_path, case):
    overrides, words = BAD_INPUT[case]
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *overrides), timeout_s=60)
    assert code == 2 and "Traceback" not in said, said
    assert all(word in said for word in words), said


def test_tensor_parallel_that_does_not_divide_the_heads(pool, arithmetic, tmp_path):
    results = pool.run(3, command_line, arguments(arithmetic, tmp_path, "parallel.tensor=3"), timeout_s=60)
    assert [code for code, _ in results] == [2, 2, 2], results
    said = "".join(text for _, text in results)
    assert said.count("parallel.tensor=3 does not divide num_attention_heads=2") == 1, said  # one rank says it


@pytest.mark.parametrize(
    "content,words",
    [
        ("", ["has no rows"]),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n', ["data.jsonl:2"]),
        ('{"question": "1+1="}\n', ["prompt", "question"]),
    ],
)
def test_bad_data_names_file_and_line(pool, arithmetic, tmp_path, content, words):
    (tmp_path / "data.jsonl").write_text(content)
    given = arguments(arithmetic, tmp_path / "run", f"data.train={tmp_path / 'data.jsonl'}")
    ((code, said),) = pool.run(1, command_line, given, timeout_s=60)
    assert code == 2 and all(word in said for word in words), said


def test_a_prompt_longer_than_allowed_is_named_or_dropped(pool, arithmetic, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "%s=", "answer": "2"}\n' % ("1+" * 20)
    )
    given = arguments(arithmetic, tmp_path / "run", f"data.train={tmp_path / 'data.jsonl'}")
    ((code, said),) = pool.run(1, command_line, given, timeout_s=60)
    assert code == 2 and "41" in said and "16" in said, said
    ((code, said),) = pool.run(1, command_line, [*given, "data.on_long_prompt=drop"], timeout_s=60)
    assert code == 0, said


def test_a_reward_that_raises_stops_every_rank_with_the_samples_id_and_traceback(pool, arithmetic, tmp_path):
    given = arguments(
        arithmetic,
        tmp_path,
        "reward.functions=[tests.reward_functions:explode_on_seven]",
        "train.prompts_per_rollout=60",
    )
    results = pool.run(2, command_line, given, timeout_s=60)
    assert [code for code, _ in results] == [1, 1], results
    said = "".join(text for _, text in results)
    assert "no reward for 7" in said and "Traceback" in said and "@0#" in said, said


@pytest.mark.parametrize("policy", ["drop", "zero"])
def test_a_reward_that_raises_costs_only_its_sample(pool, arithmetic, tmp_path, policy):
    reward = "reward.functions=[tests.reward_functions:explode_on_seven]"
    given = arguments(
        arithmetic,
        tmp_path,
        reward,
        f"reward.on_error={policy}",
        "train.prompts_per_rollout=60",
        "train.num_rollouts=1",
    )
    results = pool.run(2, command_line, given, timeout_s=60)
    assert [code for code, _ in results] == [0, 0], results
    excluded = rows_of(tmp_path)[0]["reward/excluded"]
    # a prompt's four samples fail together
    assert excluded > 0 and excluded % 4 == 0 if policy == "drop" else excluded == 0


def test_an_infinite_reward_is_refused_before_it_becomes_nan(pool, arithmetic, tmp_path):
    given = arguments(arithmetic, tmp_path, "reward.functions=[tests.reward_functions:infinite]")
    ((code, said),) = pool.run(1, command_line, given, timeout_s=60)
    assert code == 1 and "inf" in said, said


def test_an_overflow_on_the_way_to_an_advantage_ends_every_rank_alike(pool, arithmetic, tmp_path):
    """(1e308)² is infinite, and a reward over an infinite spread is 0: every step was a ghost, with exit 0."""
    given = arguments(arithmetic, tmp_path, "reward.functions=[tests.reward_functions:huge]")
    results = pool.run(2, command_line, given, timeout_s=60)
    assert [code for code, _ in results] == [1, 1], results
    for _, said in results:
        # a rank may also be ended by its peer's report of the same error
        (line,) = [line for line in said.splitlines() if "the reward of sample " in line]
        assert line.startswith("megatron_rl: "), said
        assert (
            "@0#" in line
            and "1e+308, beyond float32's 3.4e+38" in line
            and "reward.weights" in line
            and "Traceback" not in said
        )
