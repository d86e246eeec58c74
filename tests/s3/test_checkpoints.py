"""Checkpoints on a real S3 server: the same bits as on a disk, through kills, cuts, refusals and damage."""

import pathlib
import re
import shutil
import signal
from collections.abc import Callable

import pytest

from megatron_rl.checkpoint.folder import LATEST, folder_of, name_of, verify, whole_checkpoints
from tests.equality.layouts import SHARDED
from tests.equality.saved_steps import save_and_load
from tests.patience import patient
from tests.runs.command import SAVED, arguments, ended
from tests.s3.compare import assert_same_checkpoint, assert_same_records, downloaded

END = 3  # rollouts of a run
GIVEN = (*SAVED, "train.export_last=false", f"train.num_rollouts={END}", "optimizer.distributed=true")
BOUND_S = patient(300.0)
USED = "THE CHECKPOINT BEFORE IT IS USED"
TENSORS = ".distcp"


@pytest.fixture(scope="module")
def whole(pool, arithmetic, tmp_path_factory) -> pathlib.Path:
    """Return the folder of the uninterrupted run, whose checkpoints lie on the disk."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended(pool, 2, arguments(arithmetic, folder, *GIVEN))
    return folder


@pytest.fixture
def given(door, arithmetic, tmp_path) -> Callable[..., list[str]]:
    """Return a function that gives the arguments of the same run, with its checkpoints in S3."""

    def of(*more: str) -> list[str]:
        return arguments(arithmetic, tmp_path / "run", *GIVEN, f"checkpoint.dir={root_of(tmp_path)}", *more)

    return of


def root_of(tmp_path: pathlib.Path) -> str:
    return f"s3://bucket/{tmp_path.name}/checkpoints"


def assert_same_end(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Assert that the run in S3 has the uninterrupted run's last checkpoint, metrics but for clocks, and trace."""
    there = downloaded(root_of(tmp_path), tmp_path / "copied")
    assert whole_checkpoints(there) == whole_checkpoints(folder_of(root_of(tmp_path)))
    verify(there / name_of(END))
    assert_same_checkpoint(whole / "checkpoints", there, END)
    assert_same_records(whole, tmp_path / "run")


@pytest.mark.parametrize("second", [SHARDED, ("parallel.tensor=2",)], ids=["DP2", "TP2"])
def test_a_checkpoint_in_s3_equals_one_on_disk(s3, pool, tmp_path, second):
    """Saved by two ranks, loaded under the same topology to the bit, or by ranges under another."""
    root = f"s3://bucket/{tmp_path.name}"
    for found in pool.run(2, save_and_load, root, SHARDED, second, "qwen2_tied", 3, timeout_s=240):
        assert found["loaded"] and found["rate"] and found["reference"] == 0 and found["moved"] > 1e-4, found
        assert found["next"] or (second != SHARDED and found["error"] < 1e-5), found
    assert whole_checkpoints(folder_of(root)) == [7]


def test_a_run_killed_in_mid_upload_ends_with_the_same_bits_on_another_host(nursery, whole, given, door, tmp_path):
    """Both ranks are killed while tensors of the second checkpoint are sent; the host's folder is lost with them."""
    door.hold = f"PUT /bucket/{tmp_path.name}/checkpoints/{name_of(2)}/__".encode()
    with nursery.ranks(2, given(), tmp_path / "killed") as ranks:
        assert door.held.wait(BOUND_S), ranks.said()
        for fork in ranks.forks:
            fork.send_signal(signal.SIGKILL)
        ranks.wait(BOUND_S)
    door.open()
    root = folder_of(root_of(tmp_path))
    assert whole_checkpoints(root) == [0, 1]
    shutil.rmtree(tmp_path / "run")
    with nursery.ranks(2, given(), tmp_path / "again") as ranks:
        assert ranks.wait(BOUND_S) == [0, 0], ranks.said()
        assert f"{root / name_of(1)}: 1 rollouts trained" in ranks.said()
    assert_same_end(whole, tmp_path)
    assert (root / LATEST).read_text() == str(END)


def test_the_checkpoint_before_one_with_a_changed_bit_is_used(pool, whole, given, tmp_path):
    ended(pool, 2, given("train.num_rollouts=2"))
    path = folder_of(root_of(tmp_path)) / name_of(2) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(bytes(content))
    said, _ = ended(pool, 2, given())
    assert f"{name_of(2)}/__0_0.distcp has SHA-256" in said and USED in said, said
    assert_same_end(whole, tmp_path)


def test_a_connection_that_is_cut_fails_on_every_rank_and_leaves_the_checkpoint_before(
    nursery, whole, given, door, tmp_path
):
    """Uploads fail; all ranks end with code 1 and the name of one, and the same command goes on to the same bits."""
    door.cut = f"PUT /bucket/{tmp_path.name}/checkpoints/{name_of(2)}/__1".encode()
    with nursery.ranks(2, given("checkpoint.answer_s=8"), tmp_path / "cut") as ranks:
        assert ranks.wait(BOUND_S) == [1, 1], ranks.said()
        said = ranks.said()
    words = f"rank [01]: checkpoint 2 in {root_of(tmp_path)} was not written.*checkpoint.on_error=continue goes on"
    assert re.search(words, said), said
    door.open()
    assert whole_checkpoints(folder_of(root_of(tmp_path))) == [0, 1]
    with nursery.ranks(2, given(), tmp_path / "again") as ranks:
        assert ranks.wait(BOUND_S) == [0, 0], ranks.said()
    assert_same_end(whole, tmp_path)


def test_a_run_goes_on_without_a_checkpoint_that_a_silent_store_does_not_take(pool, whole, given, door, tmp_path):
    """Under checkpoint.on_error=continue a store that hangs costs one checkpoint; pruning keeps the rest."""
    door.hold = f"PUT /bucket/{tmp_path.name}/checkpoints/{name_of(2)}/rollouts_0".encode()
    more = ("checkpoint.answer_s=4", "checkpoint.on_error=continue", "checkpoint.keep_last=1")
    said, _ = ended(pool, 2, given(*more))
    assert "the store has not answered for 4 s" in said and "THE RUN GOES ON" in said, said
    assert_same_end(whole, tmp_path)
    root = folder_of(root_of(tmp_path))
    assert whole_checkpoints(root) == [END] and set(root.children()) == {name_of(END), LATEST}


def test_a_busy_store_is_asked_again(pool, whole, given, door, tmp_path):
    door.busy, door.times = b"PUT /bucket/", 4
    ended(pool, 2, given())
    assert door.times == 0
    assert_same_end(whole, tmp_path)


def test_never_is_refused_where_nothing_can_be_renamed(pool, given, tmp_path):
    ended(pool, 2, given("train.num_rollouts=1"))
    before = folder_of(root_of(tmp_path)).files()
    said = "".join(ended(pool, 2, given("checkpoint.resume=never"), code=2))
    assert f"checkpoint.dir={root_of(tmp_path)} holds 2 checkpoints of an earlier run" in said, said
    assert folder_of(root_of(tmp_path)).files() == before


@pytest.mark.parametrize("url", ["s3://nosuch/run", "s3://key:secret@bucket/run"])
def test_a_store_that_cannot_be_written_is_said_before_the_model_is_built(pool, given, url):
    said = "".join(ended(pool, 2, given(f"checkpoint.dir={url}"), code=2))
    assert "checkpoint.dir" in said and "Traceback" not in said and "secret" not in said, said
