"""Syncs to a real engine that break off or bring the wrong thing: named, not taken for whole, and exact afterwards."""

import contextlib
import errno
import os
import pathlib
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import RequestRefused
from megatron_rl.rollout.vllm.process_replica import ProcessReplica
from megatron_rl.rollout.weight_sync.transport import SEGMENT_PREFIX, Tally
from tests.pairwise import pairwise
from tests.vllm.rig import DEADLINE_S, LOGPROB_TOLERANCE, Bench, make_prompts, segments, segments_kept, sender_of

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

Change = Callable[[dict[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]
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
    # EngineLost too: a failed engine of the run's own may be started anew before it is asked again
    with pytest.raises(RuntimeError):
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


CHANNELS = ("shared_memory", "broadcast")


@pytest.mark.parametrize("channel, after", pairwise(CHANNELS, (1, 6, 25), strength=1))
def test_an_exporter_that_raises_half_way(bench, channel, after):
    """It leaves the engine without weights; a layer of the engine is half loaded then."""

    def broken(weights):
        for number, pair in enumerate(weights.items()):
            if number == after:
                raise OSError("the exporter broke")
            yield pair

    with pytest.raises(OSError, match="the exporter broke"):
        bench.sync(broken(bench.weights(3)), **(SMALL | {"channel": channel}))
    holds_nothing(bench)
    whole_sync_is_exact(bench, 4, **(SMALL | {"channel": channel}))


def without(name: str) -> Change:
    return lambda weights: [(each, x) for each, x in weights.items() if each != name]


def also(name: str, tensor: torch.Tensor | None = None) -> Change:
    return lambda weights: [*weights.items(), (name, weights[name] if tensor is None else tensor)]


def other(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda weights: [(each, change(x) if each == name else x) for each, x in weights.items()]


NORM, K = "model.norm.weight", f"{LAYER}self_attn.k_proj.weight"
QKV, UP = f"arrived in part: {LAYER}self_attn.qkv_proj", f"arrived in part: {LAYER}mlp.gate_up_proj"
IGNORED = ["63,120 values arrived", "have 63,104", "no such weight"]
# vLLM itself loads q and v without k, leaves memory that nobody wrote, ignores names, and takes the rows that it needs.
NOT_WHOLE = {
    "no norm": (without(NORM), [f"1 of the engine's 16 parameters did not arrive: {NORM}"]),
    "no embedding": (without("model.embed_tokens.weight"), ["did not arrive: model.embed_tokens.weight"]),
    "no k": (without(K), [f"{QKV} (6,272 of 8,320 values)"]),
    "no bias of v": (without(f"{LAYER}self_attn.v_proj.bias"), [f"{QKV} (8,288 of 8,320 values)"]),
    "no up": (without(f"{LAYER}mlp.up_proj.weight"), [f"{UP} (6,144 of 12,288 values)"]),
    "twice": (also(NORM), [f"'{NORM}' arrived twice"]),
    "another bias": (also(f"{LAYER}self_attn.o_proj.bias", torch.ones(16)), IGNORED),
    "a buffer": (also(f"{LAYER}self_attn.rotary_emb.inv_freq", torch.ones(16)), IGNORED),
    "twice as high": (other(K, lambda x: x.repeat(2, 1)), ["65,152 values arrived", "have 63,104", "another shape"]),
}


@pytest.mark.parametrize("kind", NOT_WHOLE)
def test_weights_that_are_not_whole_are_named(bench, kind):
    change, words = NOT_WHOLE[kind]
    fails(bench, change(bench.weights(3)), *words)


UNLOADABLE = {"a short norm": (other(NORM, lambda x: x[:-1]), "torch.Size([63])"),
              "a short k": (other(K, lambda x: x[:-1]), "exceeds dimension size"),
              "nonsense": (also(f"{LAYER}nonsense.weight", torch.ones(8)), "There is no module or parameter named")}


@pytest.mark.parametrize("kind", UNLOADABLE)
def test_what_vllm_cannot_load_is_told(bench, kind):
    """What comes after an error within vLLM's load_weights is exact, or told until the engine is started anew."""
    change, words = UNLOADABLE[kind]
    report = bench.sync(change(bench.weights(3)), **SMALL)
    assert words in report.failed[bench.replica.name], report.failed
    holds_nothing(bench)
    if bench.sync(bench.weights(9).items(), **SMALL).failed:
        bench.engine.recover([bench.replica.name])
    whole_sync_is_exact(bench, **SMALL)


def disturbed(bench: Bench, monkeypatch, act: Callable[[dict], object]) -> str:
    """Return why a sync failed of which ``act`` got the messages of the buckets of layer 1; a whole one is exact."""
    with monkeypatch.context() as planted:
        bench.watch_control(planted, lambda _, arguments: act(arguments) if is_of_layer_1(arguments) else None)
        report = bench.sync(bench.weights(3).items(), **SMALL)
    holds_nothing(bench)
    whole_sync_is_exact(bench)
    return report.failed[bench.replica.name]


def is_of_layer_1(arguments: dict) -> bool:
    return arguments.get("kind") == "bucket" and arguments["tensors"][0][0].startswith("model.layers.1.")


def test_a_flipped_byte_is_found_and_its_bucket_named(bench, monkeypatch):
    flipped = []

    def flip(arguments):
        if not flipped:
            with open(arguments["segment"], "r+b") as segment:
                segment.seek(8)
                byte = segment.read(1)[0]
                segment.seek(8)
                segment.write(bytes([byte ^ 4]))
            flipped.extend(name for name, *_ in arguments["tensors"])

    said = disturbed(bench, monkeypatch, flip)
    assert flipped and f"the bucket {flipped[0]} ... {flipped[-1]} of checksum" in said, said
    assert "did not arrive as it was sent: its part 0 of 8 has another digest" in said


def test_a_lost_bucket_is_found(bench, monkeypatch):
    assert "tensors arrived with checksum" in disturbed(bench, monkeypatch, lambda _: False)


@pytest.mark.parametrize("kind", ["foreign", "outside", "stale", "link", "short"])
def test_only_a_segment_of_ours_is_read(bench, tmp_path, kind):
    secret = tmp_path / f"{SEGMENT_PREFIX}secret"
    secret.write_bytes(bytes(64))
    mine = pathlib.Path("/dev/shm") / f"{SEGMENT_PREFIX}test-{os.getpid()}"
    path, word = {"foreign": (pathlib.Path("/dev/shm/another"), "is not a weight segment"),
                  "outside": (pathlib.Path("/dev/shm/..") / secret, "is not a weight segment"),
                  "stale": (mine, "cannot be opened here (No such file or directory)"),
                  "link": (mine, "cannot be opened here (Too many levels of symbolic links)"),
                  "short": (mine, "bytes and the bucket")}[kind]
    with contextlib.ExitStack() as stack:
        if kind in ("link", "short"):
            mine.symlink_to(secret) if kind == "link" else mine.write_bytes(bytes(8))
            stack.callback(mine.unlink)
        replica, tensor = bench.replica, ["model.norm.weight", "float32", [16], 0]
        replica.control("init_weight_transfer", {"channel": "shared_memory", "deadline_s": DEADLINE_S}, DEADLINE_S)
        replica.control("start_weight_update", {}, DEADLINE_S)
        bucket = {"kind": "bucket", "tensors": [tensor], "num_bytes": 64, "checksum": "0"}
        with pytest.raises(RequestRefused) as refused:
            replica.control("update_weights", {**bucket, "segment": str(path)}, DEADLINE_S)
        assert word in str(refused.value)
    whole_sync_is_exact(bench)


def test_a_sync_does_not_finish_without_its_end(bench):
    """Nor at an end that states another number of tensors than arrived."""
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
    """The exporter is run to its end all the same: other ranks are in its collectives."""
    drawn: list[str] = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weights = bench.weights(3)
    counted = ((drawn.append(name), (name, x))[1] for name, x in weights.items())
    with monkeypatch.context() as planted:
        planted.setattr(os, "posix_fallocate", full)
        report = bench.sync(counted, **SMALL)
    why = report.failed[bench.replica.name]
    words = ("No space left", "weight_sync.bucket_mb", "--shm-size", "weight_sync.channel=broadcast")
    assert all(word in why for word in words), why
    assert drawn == list(weights) and not report.lost
    holds_nothing(bench)
    whole_sync_is_exact(bench)


@pytest.mark.parametrize("number, channel",
                         pairwise((signal.SIGKILL, signal.SIGSTOP), CHANNELS, kept=((signal.SIGSTOP, "broadcast"),)))
def test_an_engine_killed_or_stopped_in_mid_sync_is_lost_in_bounded_time(bench, monkeypatch, number, channel):
    """It is lost before the third bucket, long before the deadline that an engine which is well has."""
    name, pid, seen = bench.replica.name, bench.pid, []

    def watch(method, arguments):
        if arguments.get("kind") == "bucket":
            seen.append(method)
            if len(seen) == 3:
                os.kill(pid, number)

    with monkeypatch.context() as planted:
        bench.watch_control(planted, watch)
        report = bench.sync(bench.weights(3).items(), **SMALL | {"channel": channel, "deadline_s": 2.0})
    assert len(seen) >= 3 and name in report.failed and set(report.lost) == {name}
    assert bench.engine.lost == [name] and bench.engine.weight_version == NO_WEIGHTS
    bench.engine.recover(bench.engine.lost)  # kills what is left of it
    assert bench.pid != pid and not pathlib.Path(f"/proc/{pid}").exists()
    whole_sync_is_exact(bench, **SMALL | {"channel": channel})


def test_a_replica_that_fails_does_not_keep_others_from_their_weights(bench):
    """One of two is gone from the start; the other's weights are whole."""
    gone = ProcessReplica({}, {}, pathlib.Path("/dev/null"))
    gone.name = "another"
    sender, version = sender_of(**SMALL), next(bench.versions)
    report = sender.deliver(iter(bench.weights(5).items()), version, [gone, bench.replica])
    sender.forget(bench.replica)
    bench.engine._sync.forget(bench.replica)
    assert list(report.failed) == ["another"] and report.lost == ("another",)
    assert bench.replica.weight_version == version and bench.largest_gap(PROMPTS) < LOGPROB_TOLERANCE
