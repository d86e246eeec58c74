"""VllmEngine over stand-in replicas: its start, its sleep, and engines that are lost on the way."""

import logging
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config import load_config
from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, EngineLost
from megatron_rl.rollout.engines.replica import Completion, ReplicaFacts, ReplicaLost, RequestRefused
from megatron_rl.rollout.groups.serialization import pack_groups, unpack_history
from megatron_rl.rollout.speculation.history import History, key_of
from megatron_rl.rollout.vllm.engine import VllmEngine
from tests.unit.rollout.fake_engine import manager_of, prompt_of
from tests.unit.rollout.receiving_engine import sender_of
from tests.unit.rollout.tiny_model import _tokenizer


class FakeReplica:
    """Answers every control message, except the words in ``silent``, each of which finds it gone."""

    ours = True

    def __init__(self) -> None:
        self.name, self.weight_version, self.asked, self.silent = "the engine", NO_WEIGHTS, [], ()
        self.failing_starts, self.levels, self.receipts = 0, [], []

    def start(self) -> None:
        self.asked.append("start")

    def restart(self) -> None:
        self.asked.append("restart")
        self.silent = ()

    def wait_ready(self, timeout_s: float) -> ReplicaFacts:
        if self.failing_starts:
            self.failing_starts -= 1
            raise ReplicaLost("free memory on device is less than desired")
        self.asked.append("ready")
        sizes = {"vocab_size": 17, "max_model_tokens": 8}
        return ReplicaFacts(vllm_version="0.32.0", logprobs_mode="processed_logprobs", **sizes)

    def check_tokenizer(self, encode, texts) -> None: ...

    def close(self) -> None:
        self.asked.append("close")

    def control(self, method: str, arguments, timeout_s: float) -> object:
        if method in self.silent:
            raise ReplicaLost(f"it did not answer {method}")
        if method == "sleep":
            self.levels.append(arguments["level"])
        self.asked.append(" ".join([method, *arguments.get("tags", ())]))
        return self.receipts  # of no worker, unless a test sets them


def vllm_engine_of(*replicas: FakeReplica, drives=True, start_late=False, max_restarts=3, more=()) -> VllmEngine:
    given = ["rollout.max_response_tokens=2", f"rollout.max_restarts={max_restarts}", *more]
    rollout = load_config(None, given).rollout
    given = {"seed": 0, "stop_ids": (0,), "vocab_size": 17, "longest": 8, "start_late": start_late}
    return VllmEngine(replicas, sender_of(1), _tokenizer(), rollout, drives=drives, **given)


def test_an_engine_that_still_starts_is_not_woken_and_one_that_slept_holds_no_weights():
    """It is awake once it serves, and its answer would be waited for by another deadline than its start's."""
    engine = vllm_engine_of(replica := FakeReplica())
    engine.wake(tags=["weights"])
    engine.recover(())
    engine.wake(tags=["kv_cache"])
    replica.weight_version = 3
    assert engine.weight_version == 3
    engine.sleep()
    assert replica.asked == ["start", "ready", "wake kv_cache", "sleep"]
    # level 2 drops the weights, so the next sync sends them again though the trainer's have not moved
    assert engine.weight_version == NO_WEIGHTS and replica.levels == [2]


@pytest.mark.parametrize("silent", ["sleep", "wake"])
def test_an_engine_that_does_not_sleep_or_wake_is_lost_and_mended_by_the_next_sync(silent):
    """A rank that raised here would leave the others in a collective."""
    engine = vllm_engine_of(replica := FakeReplica())
    engine.recover(())
    replica.weight_version, replica.silent = 3, (silent,)
    engine.sleep()
    engine.wake(tags=["weights", "kv_cache"])
    assert engine.lost == ["the engine"] and engine.weight_version == NO_WEIGHTS
    with pytest.raises(EngineLost, match=f"it did not answer {silent}"):
        engine.generate([prompt_of(0)], 1)
    engine.recover(engine.lost)
    assert replica.asked[-3:] == ["close", "restart", "ready"] and engine.lost == []
    engine.close()


@pytest.mark.parametrize("held", ["0a", "0b"])
def test_a_drafter_that_a_sleep_spoiled_loses_the_engine_at_its_wake(held):
    """The receipts are asked for once the weights are back, and not for another drafter."""
    engine = vllm_engine_of(replica := FakeReplica(), more=["rollout.speculation=draft_model"])
    engine.recover(())
    drafter = {"model": "the folder", "loaded": "0a", "held": held}
    replica.receipts = [{"version": 3, "checksum": "c", "num_tensors": 1, "failure": "", "drafter": drafter}]
    engine.sleep()
    engine.wake(tags=["weights"])
    assert engine.lost == (["the engine"] if held == "0b" else [])
    engine.wake(tags=["kv_cache"])
    last = ["close"] if held == "0b" else ["wake kv_cache"]
    assert replica.asked == ["start", "ready", "sleep", "wake weights", "weights_received", *last]
    engine.close()


def test_an_engine_on_a_shared_device_starts_once_the_trainers_state_has_left(alone):
    replica = FakeReplica()
    engine = vllm_engine_of(replica, start_late=True)
    moves = {word: lambda word=word: replica.asked.append(word) for word in ("offload", "restore")}
    manager = manager_of(engine, "weight_sync.attempts=1", version=lambda: 1, models=[SimpleNamespace(**moves)])
    assert replica.asked == []
    manager.sync_weights()
    assert replica.asked[:4] == ["offload", "start", "ready", "init_weight_transfer"]


def test_a_first_start_that_fails_is_tried_again_and_one_that_fails_for_ever_ends_the_run():
    replica = FakeReplica()
    replica.failing_starts = 3
    vllm_engine_of(replica).recover(())
    assert replica.asked == ["start", *["restart"] * 3, "ready"]
    replica.failing_starts = 3
    with pytest.raises(EngineError, match="lost 3 times in a row, and rollout.max_restarts=2. free memory on device"):
        vllm_engine_of(replica, max_restarts=2).recover(())


def test_a_rank_without_an_engine_is_not_behind():
    """A rank that drives nothing holds the version of the last sync, or each step would send weights that are there."""
    engine = vllm_engine_of(drives=False)
    assert engine.weight_version == NO_WEIGHTS
    engine.take_report(4, (), ())
    assert engine.weight_version == 4
    engine.take_report(5, ("the engine",), ())
    assert engine.weight_version == 4
    engine.sleep()
    assert engine.weight_version == NO_WEIGHTS


class DraftingReplica(FakeReplica):
    """Reads the answers that it is given to draft from, or refuses them."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.refuses, self.given, self.paths = refuses, [], []

    def control(self, method: str, arguments, timeout_s: float) -> object:
        if method == "load_history":
            self.paths.append(pathlib.Path(arguments["path"]))
            if self.refuses:
                raise RequestRefused("no room")
            history = History()
            with np.load(arguments["path"], allow_pickle=False) as file:
                history.load_state(dict(file))
            self.given.append(history)
        return super().control(method, arguments, timeout_s)


def sampled(*ids: int, version: int) -> Completion:
    given = {"logprobs": np.zeros(len(ids), np.float32), "finish_reason": "length", "drafts": (3, 1)}
    return Completion(token_ids=np.array(ids), weight_versions=((version - 1, 1), (version, len(ids) - 1)), **given)


def test_each_engine_that_starts_gets_the_answers_that_its_rank_keeps():
    """They are the distinct answers of a prompt's two latest versions, and those of a checkpoint. No file is left."""
    engine = vllm_engine_of(replica := DraftingReplica(), more=["rollout.speculation=history"])
    engine.speculation.history.load_state(unpack_history(pack_groups({})))  # of a run without drafts
    engine.recover(())
    assert replica.given == []  # it has none yet
    for version, last in ((4, 7), (5, 8), (5, 8), (6, 9)):
        engine.speculation.note((2, 3), [sampled(5, last, version=version)] * 2)
    engine.recover([replica.name])  # names an engine that is lost
    (given,) = replica.given
    assert [x.tolist() for x in given.answers(key_of((2, 3)))] == [[5, 8], [5, 9]]
    assert engine.speculation.take_counts()["speculation/drafted"] == 3 * 8
    resumed = vllm_engine_of(other := DraftingReplica(), more=["rollout.speculation=history"])
    saved = pack_groups({}, engine.speculation.history.state())
    resumed.speculation.history.load_state(unpack_history(saved))
    resumed.recover(())
    assert [x.tolist() for x in other.given[0].answers(key_of((2, 3)))] == [[5, 8], [5, 9]]
    assert not any(path.exists() for path in (*replica.paths, *other.paths))


def test_an_engine_that_refuses_the_answers_begins_without(caplog):
    engine = vllm_engine_of(replica := DraftingReplica(refuses=True), more=["rollout.speculation=history"])
    engine.speculation.note((2, 3), [sampled(5, 6, version=1)])
    with caplog.at_level(logging.WARNING):
        engine.recover(())
    assert replica.asked == ["start", "ready"] and len(replica.paths) == 1
    assert "the engine begins without earlier answers to draft from: no room" in caplog.text


@pytest.mark.parametrize("speculation", ["ngram", "off"])
def test_an_engine_that_drafts_from_no_answers_gets_none(speculation):
    engine = vllm_engine_of(replica := DraftingReplica(), more=[f"rollout.speculation={speculation!r}"])
    if engine.speculation is not None:
        engine.speculation.note((2, 3), [sampled(5, 6, version=1)])
        assert engine.speculation.history is None
    engine.recover(())
    assert replica.paths == []
