"""Damaged checkpoints, other models, unknown versions and full disks, met by whole runs through the command line."""

import json
import os
import pathlib
import pickle
import resource
import shutil
import subprocess
from collections.abc import Callable

import pytest

from megatron_rl.checkpoint.folder import MANIFEST, digest, name_of, verify, whole_checkpoints
from tests.equality.saved_steps import tensors_of
from tests.faults.kill_study import assert_same_end
from tests.pairwise import quick
from tests.patience import patient
from tests.runs.command import PPO, SAVED, arguments, command_line, copied_until, ended, rows_of, same_tensors
from tests.unit.checkpoint.signing import sign_again
from tests.workers.inputs import prepare_inputs

PAGE, END = 4096, 3  # rollouts of a run
GIVEN = (*SAVED, "train.export_last=false", f"train.num_rollouts={END}")
USED = "THE CHECKPOINT BEFORE IT IS USED"


@pytest.fixture
def run(pool, arithmetic) -> Callable[..., list[str]]:
    """Return a function that runs in a folder on two ranks, which must end with ``code``; it returns what each said."""

    def in_folder(folder: pathlib.Path, *overrides: str, **ends) -> list[str]:
        return ended(pool, 2, arguments(arithmetic, folder, *GIVEN, *overrides), **ends)

    return in_folder


@pytest.fixture(scope="module")
def whole(pool, arithmetic, tmp_path_factory) -> pathlib.Path:
    """Return the folder of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended(pool, 2, arguments(arithmetic, folder, *GIVEN))
    return folder


@pytest.fixture
def half(whole, tmp_path) -> pathlib.Path:
    """Return a copy of the run as it stood after two rollouts."""
    return copied_until(whole, tmp_path / "run", 2)


def cut(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


class Planted:
    """An object whose pickle is a call."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def signed(damage: Callable[[pathlib.Path], object]) -> Callable[[pathlib.Path], None]:
    """Return the damage with checksums that hold, so that what reads the file has to find it."""

    def change(path: pathlib.Path) -> None:
        damage(path)
        manifest = path.with_name(MANIFEST)
        files = json.loads(manifest.read_text())["files"]
        sign_again(manifest, files={**files, path.name: digest(path)})

    return change


def plant(path: pathlib.Path) -> None:
    """Put a call in place of the metadata."""
    path.write_bytes(pickle.dumps(Planted(path.parents[2] / "ran")))


DAMAGE = {
    "tensors cut": (cut, "__1_0.distcp"), "tensors flipped": (flip, "__0_0.distcp"),
    "metadata flipped": (flip, ".metadata"), "metadata with a call": (signed(plant), ".metadata"),
    "state cut": (cut, "state.json"), "format flipped": (flip, "metadata.json"), "manifest flipped": (flip, MANIFEST),
    "manifest gone": (pathlib.Path.unlink, MANIFEST),
}


def blank(path: pathlib.Path) -> None:
    """Write zeros over the tensors of a file, and leave its size."""
    path.write_bytes(bytes(path.stat().st_size))


def backwards(path: pathlib.Path) -> None:
    """Set a counter of state.json below 0."""
    state = json.loads(path.read_text())
    state["backend"]["step_index"] = -1
    path.write_text(json.dumps(state))


SIGNED = {
    "tensors cut, signed": (signed(cut), "__1_0.distcp"), "tensors blank, signed": (signed(blank), "__0_0.distcp"),
    "state out of range, signed": (signed(backwards), "state.json"), "state cut, signed": (signed(cut), "state.json"),
    "common state cut, signed": (signed(cut), "common.pt"), "format cut, signed": (signed(cut), "metadata.json"),
    "metadata cut, signed": (signed(cut), ".metadata"), "rollouts cut, signed": (signed(cut), "rollouts_1.npz"),
}
@pytest.mark.parametrize("kind", quick([*DAMAGE, *SIGNED], "tensors cut", "tensors blank, signed"))
def test_the_checkpoint_before_a_damaged_one_is_used_and_that_is_said(run, whole, half, kind):
    damage, name = (DAMAGE | SIGNED)[kind]
    if not (half / "checkpoints" / name_of(2) / name).exists():
        pytest.skip(f"this release of Megatron-Core writes no {name}")
    damage(half / "checkpoints" / name_of(2) / name)
    said, _ = run(half)
    named = [f"{name_of(2)}/{name}"] if kind in DAMAGE else [name, f"{name_of(2)} cannot be loaded"]
    assert any(words in said for words in named), said
    assert USED in said and f"{name_of(1)}: 1 rollouts trained" in said, said
    assert not (half / "ran").exists()
    assert_same_end(whole, half, END)


@pytest.mark.long(seconds=30)
def test_the_checkpoint_before_a_damaged_critics_is_used(run, tmp_path):
    """The critic's tensors cannot be read, under checksums that hold: policy and critic go back together."""
    whole = tmp_path / "whole"
    run(whole, *PPO)
    parts = copied_until(whole, tmp_path / "parts", 2)
    signed(blank)(parts / "checkpoints" / "critic" / name_of(2) / "__0_0.distcp")
    said, _ = run(parts, *PPO)
    assert USED in said and f"{name_of(1)}: 1 rollouts trained" in said
    assert_same_end(whole, parts, END)
    assert same_tensors(*(tensors_of(x / "checkpoints" / "critic" / name_of(END)) for x in (whole, parts)))


@pytest.mark.parametrize("kind", quick(DAMAGE, "tensors flipped", "metadata with a call", "manifest gone"))
def test_damage_ends_the_run_by_choice_with_the_files_name(run, half, kind):
    damage, name = DAMAGE[kind]
    damage(half / "checkpoints" / name_of(2) / name)
    before = (half / "metrics.jsonl").read_text()
    for said in run(half, "checkpoint.on_damage=fail", code=1):
        assert f"{name_of(2)}/{name}" in said and "checkpoint.on_damage=previous" in said, (kind, said)
        assert "Traceback" not in said, said
    assert not (half / "ran").exists() and (half / "metrics.jsonl").read_text() == before


def test_two_are_passed_over_and_all_damaged_is_an_error(run, whole, half):
    for iteration, name in ((2, "__0_0.distcp"), (1, "state.json")):
        flip(half / "checkpoints" / name_of(iteration) / name)
    copied = shutil.copytree(half, half.with_name("all"))
    said, _ = run(half)
    assert said.count(USED) == 2
    assert_same_end(whole, half, END)
    flip(copied / "checkpoints" / name_of(0) / "metadata.json")
    for said in run(copied, code=1):
        assert "all 3 checkpoints" in said and "checkpoint.resume=never" in said, said
    said, _ = run(copied, "checkpoint.resume=never")
    assert "kept as checkpoints.1" in said
    assert_same_end(whole, copied, END)


def test_a_checkpoint_of_another_model_is_an_error_that_names_both(run, half, tmp_path):
    other_model = prepare_inputs(tmp_path / "other", hidden=32, layers=1, heads=1, intermediate=48)
    before = (half / "metrics.jsonl").read_text() + "\n"
    (half / "metrics.jsonl").write_text(before)  # longer than when the checkpoint was taken: not cut back for nothing
    for said in run(half, f"model.hf_path={other_model / 'model'}", code=1):
        assert "another model" in said and "hidden_size 64 there and 32 here" in said and "Traceback" not in said, said
    assert (half / "metrics.jsonl").read_text() == before


def test_an_unknown_version_is_an_error_that_names_both(run, half):
    sign_again(half / "checkpoints" / name_of(2) / MANIFEST, version=9)
    for said in run(half, code=1):
        assert "version 9" in said and "reads 'megatron_rl' version 2" in said, said


# ---- a disk that is full --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of its own, as large as a few checkpoints; skip where mounting one needs more rights."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=patient(60))


def pages(paths) -> int:
    return sum(-(-path.stat().st_size // PAGE) for path in paths)


def room_for(checkpoint: pathlib.Path, what: str) -> int:
    """Return the pages with which a save fails at its first file, in the ranks' tensors, or at ``.metadata``."""
    tensors = list(checkpoint.glob("*.distcp"))
    small = [x for x in checkpoint.iterdir() if x.name in ("common.pt", "state.json")]
    free = {"half of the tensors": pages(tensors) // 2, "all but .metadata": pages([*tensors, *small]) + 1}
    return free.get(what, 0)


def fill(disk: pathlib.Path, free_pages: int) -> pathlib.Path:
    filler, found = disk / "filler", os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_bsize - free_pages * PAGE)
    return filler


WHERE = ["nothing", "half of the tensors", "all but .metadata"]


@pytest.mark.parametrize("what", quick(WHERE, WHERE[0]))
def test_a_full_disk_leaves_the_last_good_checkpoint(run, whole, half, small_disk, what):
    shutil.move(half / "checkpoints", small_disk / "checkpoints")
    (half / "checkpoints").symlink_to(small_disk / "checkpoints")
    filler = fill(small_disk, room_for(half / "checkpoints" / name_of(2), what))
    stopped = shutil.copytree(half, half.with_name("stopped"), symlinks=True)
    for said in run(stopped, code=1):
        assert "checkpoint 3" in said and "checkpoint.on_error=continue" in said, said
        assert "No space left on device" in said or "bytes are free there" in said, said
    assert_untouched(half)
    said, _ = run(half, "checkpoint.on_error=continue")
    assert said.count("THE RUN GOES ON") == 1 and len(rows_of(half)) == len(rows_of(whole)), said
    assert_untouched(half)
    filler.unlink()
    run(half, "checkpoint.on_error=continue")
    assert_same_end(whole, half, END)


def assert_untouched(run_dir: pathlib.Path) -> None:
    assert whole_checkpoints(run_dir / "checkpoints") == [0, 1, 2]
    assert not list((run_dir / "checkpoints").glob("*.partial"))
    for iteration in range(3):
        verify(run_dir / "checkpoints" / name_of(iteration))


def limited_command_line(rank: int, world: int, given: list[str]) -> tuple[int, str]:
    """Run the command line, where rank 1 cannot write a file beyond 16 KiB (its shards are larger)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        return command_line(rank, world, given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", quick(["true", "false"], "true"))
def test_one_rank_that_cannot_write_is_told_to_all(run, half, asynchronous):
    """It needs no rights to mount anything: the limit stands for a quota."""
    for policy, code in (("fail", 1), ("continue", 0)):
        folder = shutil.copytree(half, half.with_name(policy))
        given = (f"checkpoint.asynchronous={asynchronous}", f"checkpoint.on_error={policy}")
        for said in run(folder, *given, run=limited_command_line, code=code):
            assert "rank 1: checkpoint 3" in said and "File too large" in said, said
        assert_untouched(folder)
