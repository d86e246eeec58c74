"""Manifests and state.json are read whole, or refused as damage by file and field though their checksums hold."""

import copy
import json
import pathlib

import pytest

from megatron_rl.checkpoint.folder import MANIFEST, STATE, DamagedCheckpoint, begin, complete, verify
from megatron_rl.checkpoint.random_state import random_state, set_random_state
from megatron_rl.checkpoint.state_file import read_model_state, read_state
from tests.unit.checkpoint.signing import ABSENT, sign_again


@pytest.fixture(scope="module")
def good() -> dict:
    return {"feed": {**{"next_rollout": 3, "jobs": {"2": [[0, "4@0", 0], [1, "5@0", 1, 8]]}, "left": [[1, "2@0", 0]]},
                     "replay": {"entries": [{"key": "3@0", "score": 0.5, "version": 1, "uses": 0}]},
                     "reroll": {"waiting": [["7@0", 1]], "num_buffered": 1, "num_issued": 0},
                     "lengths": {"4": 17}, "sizes": {"rows": {"4": [7, 0.5]}, "variances": [1.5, 0.25]}},
            "backend": {**{"step_index": 4, "weight_version": 4, "optimizer_steps": 3, "cost_sums": [[0.0] * 11]},
                        **{"has_reference": False, "distributed_optimizer": True}},
            "prompts": {"prompts": 8, "solutions": 0, "returned": [["1@0", 0]], "seed": 0},
            "metrics": {"ghost_steps": 0, "last_step": None},
            **{"world_size": 1, "rollouts": 2, "trace_rollouts": 2, "model": {"hidden_size": 64}},
            **{"reference": {"coefficient": None}, "bytes": {"metrics.jsonl": 100}, "random": [random_state()]},
            **{"degrees": {}, "config": {}}}


def written(folder: pathlib.Path, state: object) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / STATE).write_text(state if isinstance(state, str) else json.dumps(state))
    return folder


def changed(good: dict, path: str, value: object) -> dict:
    """Return the state with the field at a dotted path replaced, or without it."""
    state = copy.deepcopy(good)
    *outer, last = path.split(".")
    holder = state
    for name in outer:
        holder = holder[int(name) if isinstance(holder, list) else name]
    if value is ABSENT:
        del holder[last]
    else:
        holder[last] = value
    return state


def test_a_states_random_states_are_those_that_were_taken(good, tmp_path):
    state = read_state(written(tmp_path / "a", good))
    assert state == good and read_model_state(tmp_path / "a") == good
    set_random_state(state["random"][0])
    assert random_state() == good["random"][0]


WRONG = [
    *[(name, ABSENT, name) for name in ("feed", "world_size", "rollouts", "model", "backend", "prompts", "random")],
    *[(name, "2", name) for name in ("rollouts", "trace_rollouts", "world_size", "feed", "config", "bytes", "metrics")],
    ("rollouts", -1, "rollouts must be 0"),
    ("rollouts", 10**20, "rollouts must be 0"),
    ("rollouts", True, "rollouts must be an integer"),
    ("supervised_steps", 1.5, "supervised_steps must be an integer"),
    ("world_size", 2, "random holds the states of 1 ranks"),
    ("world_size", 10**9, "world_size must be 1"),
    ("backend.step_index", -4, "backend: step_index"),
    ("backend.optimizer_steps", None, "backend: optimizer_steps"),
    ("backend.has_reference", 1, "backend: has_reference must be true or false"),
    ("backend.cost_sums", [[0.0], [0.0, 1.0]], "cost_sums[1] has 2 columns"),
    ("backend.cost_sums", [["x"]], "cost_sums[0][0]"),
    ("feed.next_rollout", {}, "feed: next_rollout"),
    ("feed.jobs", {"x": []}, "feed.jobs.x"),
    ("feed.jobs", {"1": [[0, 1, 2]]}, "feed.jobs.1[0][0] must be a text"),
    ("feed.jobs", {"1": [[0]]}, "feed.jobs.1[0] must be a place"),
    ("feed.left", [[0, 1, 2]], "feed.left[0][0] must be a text"),
    ("feed.lengths", {"4": "17"}, "feed.lengths: 4 must be an integer"),
    ("feed.jobs", {"1": [[0, "1@0", 0, 0]]}, "feed.jobs.1[0][3] must be 1"),
    ("feed.sizes", {"rows": {}}, "feed.sizes lacks the field variances"),
    ("feed.sizes", {"rows": {}, "variances": [0, 1], "x": 0}, "a field 'x'"),
    ("feed.sizes.rows", {"4": [1]}, "feed.sizes.rows.4 must be two numbers"),
    ("feed.sizes.rows", {"4": [1, -1]}, "feed.sizes.rows.4[1]=-1 must be"),
    ("feed.sizes.variances", ["x", 1], "feed.sizes.variances[0]"),
    ("feed.replay.entries", [{"key": "a"}], "feed.replay.entries[0] lacks the field score"),
    ("feed.replay.entries", [{"key": "a", "score": 0, "version": 0, "uses": 0, "x": 0}], "a field 'x'"),
    ("feed.reroll.waiting", [["7@0"]], "feed.reroll.waiting[0]"),
    ("prompts.prompts", -8, "prompts: prompts"),
    ("prompts.returned", "8", "prompts: returned"),
    ("metrics.last_step", "4", "metrics: last_step"),
    ("reference.coefficient", -0.5, "reference: coefficient"),
    ("bytes", {"metrics.jsonl": -1}, "bytes: metrics.jsonl"),
    ("random", [3], "random[0] must be an object"),
    ("random.0.torch", "AAAA", "random[0].torch is not a generator's state"),
    ("random.0.torch", "not base64", "random[0].torch is not a generator's state"),
    ("random.0.python", [3, [1], None], "random[0].python is not the state"),
    ("random.0.numpy", ["PCG64", [0] * 624, 0, 0, 0.0], "random[0].numpy is not the state"),
    ("random.0.numpy", ["MT19937", [2**32] * 624, 0, 0, 0.0], "random[0].numpy[1][0] must be 0"),
    ("random.0.numpy", ["MT19937", [0] * 624, 700, 0, 0.0], "random[0].numpy[2]"),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG)
def test_a_field_that_is_wrong_is_damage_by_its_name(good, tmp_path, path, value, words):
    with pytest.raises(DamagedCheckpoint) as caught:
        read_state(written(tmp_path / "a", changed(good, path, value)))
    assert str(tmp_path / "a" / STATE) in str(caught.value) and words in str(caught.value), caught.value
    assert len(str(caught.value)) < 600


TEXTS = {  # what else JSON may not be: tests/unit/config/test_json_text.py
    "deep nesting": '{"model": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "nothing": "",
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_text_that_is_no_json_of_ours_is_damage_by_its_files_name(tmp_path, kind, name):
    (tmp_path / name).write_bytes(TEXTS[kind].encode(errors="surrogateescape"))
    with pytest.raises(DamagedCheckpoint) as caught:
        read_state(tmp_path) if name == STATE else verify(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and len(str(caught.value)) < 600, caught.value


def test_a_rewritten_manifest_is_damage_by_its_field(tmp_path):
    for changes, words in (
        ({"files": ABSENT}, "lacks the field files"),
        ({"files": []}, "files must be an object"),
        ({"files": {}}, f"files lacks {STATE}"),
        ({"files": {STATE: 5}}, f"files.{STATE} must be an object"),
        ({"files": {STATE: {"bytes": -1, "sha256": "0" * 64}}}, "bytes must be 0"),
        ({"files": {STATE: {"bytes": "2", "sha256": "0" * 64}}}, "bytes must be an integer"),
        ({"files": {STATE: {"bytes": 2}}}, "lacks the field sha256"),
        ({"files": {STATE: {"bytes": 2, "sha256": "x"}}}, "sha256 is no SHA-256"),
        ({"files": {STATE: {"bytes": 2, "sha256": 7}}}, "sha256 must be a text"),
        ({"iteration": 5}, "iteration is 5, and the folder's name is iter_0000004"),
        ({"iteration": "4"}, "iteration must be an integer"),
        ({"version": "2"}, "version must be an integer"),
        ({"version": ABSENT}, "lacks the field version"),
        ({"format": [["megatron_rl"]]}, "format must be a text"),
    ):
        partial = begin(tmp_path, 4)
        (partial / STATE).write_text("{}")
        path = complete(partial, {}) / MANIFEST
        sign_again(path, **changes)
        with pytest.raises(DamagedCheckpoint) as caught:
            verify(path.parent)
        assert str(path) in str(caught.value) and words in str(caught.value), caught.value
