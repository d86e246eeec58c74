"""Syncs to a real engine that break off or bring the wrong thing.

They are named, nothing is taken for whole, and a whole sync afterwards is exact.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.rollout.engine import NO_WEIGHTS
from megatron_rl.rollout.vllm.process_replica import ProcessReplica
from megatron_rl.rollout.vllm.replica import RequestRefused
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.rollout.weight_sync.transport import SEGMENT_PREFIX, Tally
from tests.patience import HANG_S, patient
from tests.vllm.rig import CPU, DEADLINE_S, LOGPROB_TOLERANCE, Bench, make_prompts, segments, segments_kept

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS = make_prompts(5, 40, 70)
LAYER = "model.layers.0."
SMALL = {"channel": "shared_memory", "bucket_bytes": 12_000}  # several buckets, so that most faults fall between two


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory(bench) -> Iterator[None]:
    assert sorted(segments()) == sorted(segments_kept(bench))
    yield
    if bench.engine.weight_version == NO_WEIGHTS:  # a test that failed: the next one is not to suffer from it
        bench.engine.recover([bench.replica.name])
    assert sorted(segments()) == sorted(segments_kept(bench))


def whole_sync_is_exact(bench: Bench, seed: int = 9, **changes) -> None:
    bench.load(seed, **changes)
    assert bench.largest_gap(PROMPTS) < LOGPROB_TOLERANCE


def holds_nothing(bench: Bench) -> None:
    assert bench.engine.weight_version == bench.replica.weight_version == NO_WEIGHTS
    with pytest.raises(
        RuntimeError
    ):  # EngineLost too: a failed engine of the run's own may be started anew before it is asked again
        bench.engine.generate(PROMPTS, 1)
    if bench.pid:
        assert bench.replica.control("weights_received", {}, DEADLINE_S) == [
            {"version": -1, "checksum": "", "num_tensors": 0, "failure": ""}
        ]


def fails(bench: Bench, weights, *words: str, **changes) -> None:
    """Run one sync that fails with the words; the engine then holds nothing, and is exact after a whole one."""
    report = bench.sync(weights, **(SMALL | changes))
    assert list(report.failed) == [bench.replica.name] and not report.lost
    assert all(word in report.failed[bench.replica.name] for word in words), report.failed
    holds_nothing(bench)
    whole_sync_is_exact(bench, **SMALL)


@pytest.mark.parametrize("channel", ["shared_memory", "broadcast"])
@pytest.mark.parametrize("after", [1, 6, 25])
def test_an_exporter_that_raises_half_way(bench, channel, after):
    """An exporter that raises half-way leaves the engine without weights.

    Tensor ``after`` is refused by the trainer's own side: a layer of the engine is half loaded then.
    """

    def broken(weights):
        for number, pair in enumerate(weights.items()):
            if number == after:
                raise OSError("the exporter broke")
            yield pair

    with pytest.raises(OSError, match="the exporter broke"):
        bench.sync(broken(bench.weights(3)), **(SMALL | {"channel": channel}))
    holds_nothing(bench)
    whole_sync_is_exact(bench, 4, **(SMALL | {"channel": channel}))


@pytest.mark.parametrize(
    "name, words",
    [
        ("model.norm.weight", ["1 of the engine's 16 parameters did not arrive: model.norm.weight"]),
        ("model.embed_tokens.weight", ["did not arrive: model.embed_tokens.weight"]),
        (f"{LAYER}self_attn.k_proj.weight", ["arrived in part", f"{LAYER}self_attn.qkv_proj (6,272 of 8,320 values)"]),
        (f"{LAYER}self_attn.v_proj.bias", ["arrived in part", f"{LAYER}self_attn.qkv_proj (8,288 of 8,320 values)"]),
        (f"{LAYER}mlp.up_proj.weight", ["arrived in part", f"{LAYER}mlp.gate_up_proj (6,144 of 12,288 values)"]),
    ],
)
def test_a_missing_tensor_is_named(bench, name, words):
    """A missing tensor is named.

    vLLM itself loads q and v without k, and goes on with memory that nobody wrote.
    """
    weights = bench.weights(3)
    del weights[name]
    fails(bench, weights.items(), *words)


def test_a_tensor_delivered_twice_is_named(bench):
    weights = bench.weights(3)
    fails(
        bench,
        [*weights.items(), ("model.norm.weight", weights["model.norm.weight"])],
        "'model.norm.weight' arrived twice",
    )


@pytest.mark.parametrize(
    "name",
    [f"{LAYER}self_attn.o_proj.bias", f"{LAYER}self_attn.rotary_emb.inv_freq"],
)
def test_a_weight_that_vllm_ignores_is_told(bench, name):
    fails(
        bench,
        [*bench.weights(3).items(), (name, torch.ones(16))],
        "63,120 values arrived",
        "have 63,104",
        "no such weight",
    )


def test_a_tensor_that_vllm_would_cut_is_told(bench):
    """A tensor that vLLM would cut is told: k_proj is twice as high, and vLLM takes the rows that it needs."""
    weights = bench.weights(3)
    weights[f"{LAYER}self_attn.k_proj.weight"] = weights[f"{LAYER}self_attn.k_proj.weight"].repeat(2, 1)
    fails(bench, weights.items(), "65,152 values arrived", "have 63,104", "another shape")


def stands_after_restart(bench: Bench, weights, *words: str) -> None:
    """Assert that an error within vLLM's load_weights is told.

    What comes next is exact, or told again until the engine is started anew.
    """
    report = bench.sync(weights, **SMALL)
    assert all(word in report.failed[bench.replica.name] for word in words), report.failed
    holds_nothing(bench)
    if bench.sync(bench.weights(9).items(), **SMALL).failed:
        bench.engine.recover([bench.replica.name])
    whole_sync_is_exact(bench, **SMALL)


@pytest.mark.parametrize(
    "name, change, word",
    [
        ("model.norm.weight", lambda x: x[:-1], "torch.Size([63])"),
        (f"{LAYER}self_attn.k_proj.weight", lambda x: x[:-1], "exceeds dimension size"),
        (f"{LAYER}nonsense.weight", None, "There is no module or parameter named"),
    ],
)
def test_what_vllm_cannot_load_is_told(bench, name, change, word):
    weights = bench.weights(3)
    weights[name] = torch.ones(8) if change is None else change(weights[name])
    stands_after_restart(bench, weights.items(), word)


def test_a_flipped_byte_is_found_and_its_bucket_named(bench, monkeypatch):
    control, flipped = bench.replica.control, []

    def disturbed(method, arguments, timeout_s):
        if (
            arguments.get("kind") == "bucket"
            and not flipped
            and arguments["tensors"][0][0].startswith("model.layers.1.")
        ):
            with open(arguments["segment"], "r+b") as segment:
                segment.seek(8)
                byte = segment.read(1)[0]
                segment.seek(8)
                segment.write(bytes([byte ^ 4]))
            flipped.extend(name for name, *_ in arguments["tensors"])
        return control(method, arguments, timeout_s)

    with monkeypatch.context() as planted:
        planted.setattr(bench.replica, "control", disturbed)
        report = bench.sync(bench.weights(3).items(), **SMALL)
    said = report.failed[bench.replica.name]
    assert flipped and f"the bucket {flipped[0]} ... {flipped[-1]} of checksum" in said, said
    assert "did not arrive as it was sent: its part 0 of 8 has another digest" in said
    holds_nothing(bench)
    whole_sync_is_exact(bench)


def test_a_lost_bucket_is_found(bench, monkeypatch):
    control = bench.replica.control

    def forgetful(method, arguments, timeout_s):
        skipped = arguments.get("kind") == "bucket" and arguments["tensors"][0][0].startswith("model.layers.1.")
        return None if skipped else control(method, arguments, timeout_s)

    with monkeypatch.context() as planted:
        planted.setattr(bench.replica, "control", forgetful)
        report = bench.sync(bench.weights(3).items(), **SMALL)
    assert "tensors arrived with checksum" in report.failed[bench.replica.name]
    holds_nothing(bench)
    whole_sync_is_exact(bench)


@pytest.mark.parametrize("kind", ["foreign", "outside", "stale", "link", "short"])
def test_only_a_segment_of_ours_is_read(bench, tmp_path, kind):
    secret = tmp_path / f"{SEGMENT_PREFIX}secret"
    secret.write_bytes(bytes(64))
    mine = pathlib.Path("/dev/shm") / f"{SEGMENT_PREFIX}test-{os.getpid()}"
    path, word = {
        "foreign": (pathlib.Path("/dev/shm/another"), "is not a weight segment"),
        "outside": (pathlib.Path("/dev/shm/..") / secret, "is not a weight segment"),
        "stale": (mine, "cannot be opened here (No such file or directory)"),
        "link": (mine, "cannot be opened here (Too many levels of symbolic links)"),
        "short": (mine, "bytes and the bucket"),
    }[kind]
    with contextlib.ExitStack() as stack:
        if kind in ("link", "short"):
            mine.symlink_to(secret) if kind == "link" else mine.write_bytes(bytes(8))
            stack.callback(mine.unlink)
        replica = bench.replica
        replica.control("init_weight_transfer", {"channel": "shared_memory", "deadline_s": DEADLINE_S}, DEADLINE_S)
        replica.control("start_weight_update", {}, DEADLINE_S)
        bucket = {
            "kind": "bucket",
            "tensors": [["model.norm.weight", "float32", [16], 0]],
            "num_bytes": 64,
            "checksum": "0",
        }
        with pytest.raises(RequestRefused) as refused:
            replica.control("update_weights", {**bucket, "segment": str(path)}, DEADLINE_S)
        assert word in str(refused.value)
    whole_sync_is_exact(bench)


def test_a_sync_does_not_finish_without_its_end(bench):
    """A sync does not finish without its end, nor at an end that states another number of tensors than arrived."""
    replica = bench.replica
    replica.control("start_weight_update", {}, DEADLINE_S)
    with pytest.raises(RequestRefused, match="finish_weight_update without the sync's end"):
        replica.control("finish_weight_update", {"weight_version": "7"}, DEADLINE_S)
    end = {"kind": "end", "version": 7, "checksum": Tally().value()}
    with pytest.raises(RequestRefused, match="0 tensors arrived"):
        replica.control("update_weights", {**end, "num_tensors": 1}, DEADLINE_S)
    with pytest.raises(RequestRefused, match="parameters did not arrive"):
        replica.control("start_weight_update", {}, DEADLINE_S)
        replica.control("update_weights", {**end, "num_tensors": 0}, DEADLINE_S)
    whole_sync_is_exact(bench)


def test_no_room_in_shared_memory_says_what_to_do(bench, monkeypatch):
    """No room in shared memory is told with the way out.

    The exporter is run to its end all the same: other ranks are in its collectives.
    """
    drawn = []

    def counted(weights):
        for pair in weights.items():
            drawn.append(pair[0])
            yield pair

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weights = bench.weights(3)
    with monkeypatch.context() as planted:
        planted.setattr(os, "posix_fallocate", full)
        report = bench.sync(counted(weights), **SMALL)
    why = report.failed[bench.replica.name]
    assert all(
        word in why
        for word in ("No space left", "weight_sync.bucket_mb", "--shm-size", "weight_sync.channel=broadcast")
    ), why
    assert drawn == list(weights) and not report.lost
    holds_nothing(bench)
    whole_sync_is_exact(bench)


@contextlib.contextmanager
def in_mid_sync(bench: Bench, act) -> Iterator[None]:
    """Call ``act`` before the third bucket of the next sync."""
    control, seen = bench.replica.control, []

    def watched(method, arguments, timeout_s):
        if arguments.get("kind") == "bucket":
            seen.append(method)
            if len(seen) == 3:
                act()
        return control(method, arguments, timeout_s)

    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(bench.replica, "control", watched)
        yield
    assert len(seen) >= 3


@pytest.mark.parametrize("channel", ["shared_memory", "broadcast"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_killed_or_stopped_in_mid_sync_is_lost_in_bounded_time(bench, number, channel):
    deadline_s, name, pid = 2.0, bench.replica.name, bench.pid
    started = time.monotonic()
    with in_mid_sync(bench, lambda: os.kill(pid, number)):
        report = bench.sync(bench.weights(3).items(), **SMALL | {"channel": channel, "deadline_s": deadline_s})
    took = time.monotonic() - started
    print(f"{channel}, {number.name}: {took:.1f} s, {report.failed}")
    assert name in report.failed and set(report.lost) == {name}
    assert took < patient(HANG_S)  # some answers, each with its deadline, and the wait for a dead process's exit code
    assert bench.engine.lost == [name] and bench.engine.weight_version == NO_WEIGHTS
    bench.engine.recover(bench.engine.lost)  # kills what is left of it
    assert bench.pid != pid and not pathlib.Path(f"/proc/{pid}").exists()
    whole_sync_is_exact(bench, **SMALL | {"channel": channel})


def test_a_replica_that_fails_does_not_keep_others_from_their_weights(bench):
    """A replica that fails does not keep others from their weights.

    One of two is gone from the start; the other's weights are whole.
    """
    gone = ProcessReplica({}, {}, pathlib.Path("/dev/null"))
    gone.name = "another"
    sender = WeightSender(deadline_s=DEADLINE_S, device=CPU, **SMALL)
    version = next(bench.versions)
    report = sender.deliver(iter(bench.weights(5).items()), version, [gone, bench.replica])
    sender.forget(bench.replica)
    bench.engine._sync.forget(bench.replica)
    assert list(report.failed) == ["another"] and report.lost == ("another",)
    assert bench.replica.weight_version == version and bench.largest_gap(PROMPTS) < LOGPROB_TOLERANCE
