"""Checks observability/metrics.py: sums are divided last, rows survive the file, nothing of an earlier run is lost."""

import dataclasses
import json
import logging
import math

import numpy as np
import pytest

from megatron_rl.config import MetricsConfig
from megatron_rl.observability.metrics import MetricsWriter, add_sums, divide, read_metrics, skip_metrics, step_metrics
from megatron_rl.observability.summary import duration, summarize
from megatron_rl.types import BatchFacts, StepKind, StepPlan, StepResult

OFF = MetricsConfig(progress=False)
GOOD = '{"step": 0, "step_kind": "REAL", "phase": "rl", "reward/mean": 0.5}\n'


def row(step: int, **metrics: object) -> dict[str, object]:
    named = {key.replace("__", "/"): value for key, value in metrics.items()}
    return {"step": step, "step_kind": StepKind.REAL, "phase": "rl"} | named


def test_sums_are_divided_last():
    """Two ranks of 100 and 900 tokens give the token loop's mean, never the mean of the ranks' means."""
    random = np.random.default_rng(0)
    entropy_D = [random.gamma(2.0, 0.5, size=100), random.gamma(2.0, 0.1, size=900)]
    ranks = [{"tokens": len(x), "entropy": float(x.sum()), "logprob_gap_max": float(x.max())} for x in entropy_D]
    ranks = [rank | {"loss": rank["entropy"] / 1000} for rank in ranks]  # its weights are inside
    total, largest = 0.0, -math.inf
    for value in (*entropy_D[0], *entropy_D[1]):
        total, largest = total + value, max(largest, value)
    metrics = divide(add_sums(*ranks))
    # the two additions round in another order
    assert metrics["train/loss"] == pytest.approx(total / 1000, rel=1e-12) == metrics["train/entropy"]
    assert metrics["train/logprob_gap_max"] == largest
    mean_of_means = (entropy_D[0].mean() + entropy_D[1].mean()) / 2
    assert abs(metrics["train/entropy"] - mean_of_means) > 0.1


def test_every_sum_has_its_name_absent_ones_none_and_a_step_adds_norm_and_rate():
    sums = dict(loss=2.0, tokens=10, entropy=5.0, kl=1.0, clipped=3, ratio=11.0)
    gaps = dict(logprob_gap_abs=0.5, logprob_gap_max=0.2, logprob_gap_k3=0.1)
    wanted = dict(loss=2.0, entropy=0.5, kl=0.1, clip_ratio=0.3, ratio=1.1)
    wanted |= dict(logprob_gap_mean=0.05, logprob_gap_max=0.2, logprob_gap_k3=0.01)
    assert divide(sums | gaps) == {f"train/{name}": value for name, value in wanted.items()} and divide({}) == {}
    assert divide({"loss": 0.0, "tokens": 0, "entropy": 0.0, "logprob_gap_max": 0.0}) == {"train/loss": 0.0}
    with pytest.raises(ValueError, match="entropy and no tokens"):
        divide({"entropy": 1.0})
    result = StepResult(kind=StepKind.REAL, grad_norm=0.5, learning_rate=1e-6, applied=True, sums={"loss": 1.0})
    assert step_metrics(result) == {"train/loss": 1.0, "train/grad_norm": 0.5, "train/lr": 1e-6, "train/applied": 1.0}


def facts() -> BatchFacts:
    """Return the facts of six samples of 10, 20, ... 60 tokens."""
    zeros, response = np.zeros(6, dtype=np.int64), 10 * np.arange(1, 7) - 4
    lengths = dict(prompt_tokens=zeros + 4, response_tokens=response, loss_tokens=response)
    return BatchFacts(sample_ids=tuple("abcdef"), groups=zeros, owners=zeros, owner_rows=np.arange(6), **lengths)


def mini_batch(kind: StepKind, members: list[int], dropped: list[int], order: list[int]) -> StepPlan:
    """Plan all of ``order`` in one micro-batch of rank 0; rank 1 is silent."""
    count, integers = int(bool(order)), {"members": members, "dropped": dropped, "order": order}
    integers |= {"microbatch_offsets": [0, len(order)][: count + 1], "rank_offsets": [0, count, count]}
    arrays = {name: np.asarray(values, dtype=np.int64) for name, values in integers.items()}
    return StepPlan(kind=kind, filler_microbatches=np.zeros(count, dtype=bool), microbatches_dropped=2, **arrays)


def test_skip_metrics_of_a_real_step_of_skip_off_and_of_a_ghost():
    signal_S = np.asarray([True, False, True, False, True, True])
    metrics = skip_metrics(mini_batch(StepKind.REAL, [0, 1, 2, 3], [1, 3], [2, 0]), facts(), signal_S)
    wanted = dict(zero_advantage_ratio=0.5, samples_dropped=2, tokens_dropped=60, microbatches_dropped=2)
    wanted |= dict(samples_merged=0)
    wanted |= dict(silent_ranks=1, filler_microbatches=0, tokens_executed=40, tokens_dense=100, speedup_ideal=2.5)
    assert metrics == {f"skip/{name}": value for name, value in wanted.items()} | {"tokens/trailing": 0}
    metrics = skip_metrics(mini_batch(StepKind.REAL, [0, 1, 2, 3], [], [0, 1, 2, 3]), facts(), np.arange(6) == 0)
    # sample 2 has signal and does not run: another one of the step counts for it
    merged = skip_metrics(mini_batch(StepKind.REAL, [0, 1, 2, 3], [1, 2, 3], [0]), facts(), signal_S)
    assert (merged["skip/samples_dropped"], merged["skip/samples_merged"]) == (3, 1)
    names = ("skip/zero_advantage_ratio", "skip/samples_dropped", "skip/speedup_ideal")
    assert [metrics[name] for name in names] == [0.75, 0, 1.0]
    ghost = skip_metrics(mini_batch(StepKind.GHOST, [0, 1], [0, 1], []), facts(), np.zeros(6, dtype=bool))
    names = ("skip/zero_advantage_ratio", "skip/tokens_executed", "skip/silent_ranks")
    assert [ghost[name] for name in names] == [1.0, 0, 0] and "skip/speedup_ideal" not in ghost
    with pytest.raises(ValueError, match=r"shape \(5,\) and the batch 6 samples"):
        skip_metrics(mini_batch(StepKind.GHOST, [0], [0], []), facts(), np.zeros(5, dtype=bool))


def test_tokens_that_no_loss_token_needs_are_counted_apart_and_a_shared_prompt_once():
    """Of samples of 10, 20, ... 60 tokens, numbers 0 and 2 read 3 and 9 response tokens, the others all."""
    whole = facts()
    read = whole.response_tokens.copy()
    read[[0, 2]] = 3, 9
    given = dataclasses.replace(whole, response_inputs=read)
    metrics = skip_metrics(mini_batch(StepKind.REAL, [0, 1, 2, 3], [1, 3], [2, 0]), given, np.arange(6) % 2 == 0)
    trailing = int((whole.response_tokens - read).sum())
    assert metrics["tokens/trailing"] == trailing > 0
    assert (metrics["skip/tokens_executed"], metrics["skip/tokens_dense"]) == (40 - trailing, 100 - trailing)
    # samples 0 and 2 have one prompt of 4 tokens, sample 3 another; three of them run in one micro-batch
    given = dataclasses.replace(facts(), prompt_keys=np.array([7, 8, 7, 9, 9, 9]))
    step = mini_batch(StepKind.REAL, [0, 1, 2, 3], [1], [2, 0, 3])
    metrics = skip_metrics(step, given, np.arange(6) != 1, share_prompts=True)
    assert (metrics["skip/tokens_executed"], metrics["tokens/shared"]) == (10 + 30 + 40 - 4, 4)
    apart = skip_metrics(step, given, np.arange(6) != 1)
    assert apart["skip/tokens_executed"] == 80 and "tokens/shared" not in apart


def test_rows_survive_the_file(tmp_path):
    """Numpy scalars and non-finite values come back too, and the file is strict JSON; ghost steps are counted."""
    with MetricsWriter(tmp_path, OFF, 3, True) as writer:
        written = [
            writer.write(row(0, train__loss=0.1 + 0.2, train__lr=np.float32(0.5), skip__samples_dropped=np.int64(3))),
            writer.write(row(1, train__grad_norm=math.inf, train__loss=-math.inf) | {"step_kind": StepKind.GHOST}),
            writer.write(row(2, train__grad_norm=0.5) | {"step_kind": "GHOST"}),
        ]
        assert read_metrics(tmp_path / "metrics.jsonl") == written, "every row is flushed when it is written"
    assert [r["skip/ghost_steps"] for r in written] == [0, 1, 2]
    first = row(0, train__loss=0.1 + 0.2, train__lr=0.5, skip__samples_dropped=3, skip__ghost_steps=0)
    assert written[0] == first | {"step_kind": "REAL"}
    second = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert (second["train/grad_norm"], second["train/loss"]) == ("inf", "-inf")
    with MetricsWriter(tmp_path / "nan", OFF, 1, True) as writer:
        writer.write(row(0, train__loss=math.nan))
    assert math.isnan(read_metrics(tmp_path / "nan" / "metrics.jsonl")[0]["train/loss"])


def test_earlier_runs_are_kept_and_other_ranks_write_nothing(tmp_path, caplog):
    for loss in (1.0, 2.0, 3.0):
        with MetricsWriter(tmp_path, OFF, 1, True) as writer:
            writer.write(row(0, train__loss=loss))
    files = [tmp_path / f"metrics.jsonl{end}" for end in (".1", ".2", "")]
    assert [read_metrics(path)[0]["train/loss"] for path in files] == [1.0, 2.0, 3.0]
    assert "kept as metrics.jsonl.2" in caplog.text
    with MetricsWriter(tmp_path / "other", MetricsConfig(tensorboard=True, wandb_project="x"), 1, False) as writer:
        assert writer.write(row(0) | {"step_kind": StepKind.GHOST})["skip/ghost_steps"] == 1
    assert not (tmp_path / "other").exists()


def test_bad_rows_are_refused(tmp_path):
    with MetricsWriter(tmp_path, OFF, 2, True) as writer:
        with pytest.raises(ValueError, match="lacks step_kind"):
            writer.write({"step": 0, "phase": "rl"})
        with pytest.raises(TypeError, match="train/loss=None is a NoneType"):
            writer.write(row(0, train__loss=None))
        writer.write(row(4))
        with pytest.raises(ValueError, match="step=4 after step=4"):
            writer.write(row(4))
    with pytest.raises(ValueError, match="after close"):
        writer.write(row(5))


@pytest.mark.parametrize(("line", "said"), [
    ("{", "Expecting"),
    ("[1]", "a row is an object"),
    ('{"step": 1, "phase": "rl"}', "lacks step_kind"),
    (GOOD.strip(), "step=0 after step=0"),
    (GOOD.replace(": 0,", ": 1,").replace("0.5", "NaN").strip(), "NaN is not JSON"),
    (GOOD.replace(": 0,", ": 1,").replace("0.5", "null").strip(), "reward/mean=None is not a number"),
])
def test_malformed_lines_are_named_and_a_truncated_last_one_is_left_out(tmp_path, caplog, line, said):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}{line}\n{GOOD}")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: ") as caught:
        read_metrics(path)
    assert said in str(caught.value)
    path.write_text(GOOD + GOOD[:20])
    with caplog.at_level(logging.WARNING):
        assert len(read_metrics(path)) == 1
    assert "metrics.jsonl:2 is cut off" in caplog.text


def test_summary_leaves_the_warmup_out_and_durations_read_well():
    rows = [row(s, time__step_s=100.0) | {"phase": "warmup", "step_kind": "REAL"} for s in range(5)]
    for s in range(40):
        kind = "GHOST" if s % 4 == 0 else "REAL"
        tokens = {"skip/tokens_executed": 30, "skip/tokens_dense": 100, "step_kind": kind}
        rows.append(row(5 + s, reward__mean=s / 40, time__step_s=1.0 + s % 3) | tokens)
    summary = summarize(rows)
    assert (summary.num_warmup, summary.num_real, summary.num_ghost, summary.window) == (5, 30, 10, 10)
    assert summary.reward == pytest.approx((np.arange(10).mean() / 40, np.arange(30, 40).mean() / 40))
    assert summary.executed_ratio == 0.3 and (summary.step_s, summary.zero_advantage_ratio) == (2.0, None)
    assert summary.total_s == 500 + sum(1.0 + s % 3 for s in range(40))
    assert [duration(s) for s in (4.2, 59.7, 185, 7620)] == ["4.2 s", "1 min 00 s", "3 min 05 s", "2 h 07 min"]
