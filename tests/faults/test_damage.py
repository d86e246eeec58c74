"""Damaged checkpoints, other models, unknown versions and full disks, met by whole runs through the command line."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import resource
import shutil
import subprocess

import pytest
import torch

from megatron_rl.checkpoint.folder import MANIFEST, digest, name_of, verify, whole_checkpoints
from tests.equality.saved_steps import tensors_of
from tests.patience import patient
from tests.runs.command import PPO, arguments, command_line, rows_of, timeless
from tests.unit.checkpoint.signing import sign_again
from tests.workers.inputs import prepare_inputs

SAVED = (
    "optimizer.schedule=constant",
    "checkpoint.save_every_rollouts=1",
    "checkpoint.keep_last=null",
    "train.export_last=false",
)
PAGE = 4096


def run(pool, inputs: pathlib.Path, run_dir: pathlib.Path, *overrides: str) -> list[tuple[int, str]]:
    """Run the command line and return the exit code and words of both ranks."""
    return pool.run(2, command_line, arguments(inputs, run_dir, *SAVED, *overrides), timeout_s=120)


@pytest.fixture(scope="module")
def whole(pool, arithmetic, tmp_path_factory) -> pathlib.Path:
    """Return the folder of the uninterrupted run of four rollouts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert [code for code, _ in run(pool, arithmetic, folder, "train.num_rollouts=4")] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def ended(pool, arithmetic, tmp_path_factory) -> pathlib.Path:
    """Return the folder of the same run, ended after two rollouts; tests go on from copies."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    assert [code for code, _ in run(pool, arithmetic, folder, "train.num_rollouts=2")] == [0, 0]
    return folder


@pytest.fixture
def half(ended, tmp_path) -> pathlib.Path:
    return shutil.copytree(ended, tmp_path / "run")


def assert_same_end(whole: pathlib.Path, other: pathlib.Path) -> None:
    one, two = (tensors_of(x / "checkpoints" / name_of(4)) for x in (whole, other))
    assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(other)]
    assert (whole / "trace.jsonl").read_text() == (other / "trace.jsonl").read_text()


def cut(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def remove(path: pathlib.Path) -> None:
    path.unlink()


class Planted:
    """An object whose pickle is a call."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def plant(path: pathlib.Path) -> None:
    """Put a call in place of the metadata, in a checkpoint whose checksums hold."""
    path.write_bytes(pickle.dumps(Planted(path.parents[2] / "ran")))
    manifest = path.with_name(MANIFEST)
    files = json.loads(manifest.read_text())["files"]
    sign_again(manifest, files={**files, path.name: digest(path)})


DAMAGE = {
    "tensors cut": (cut, "__1_0.distcp"),
    "tensors flipped": (flip, "__0_0.distcp"),
    "metadata flipped": (flip, ".metadata"),
    "metadata with a call": (plant, ".metadata"),
    "state cut": (cut, "state.json"),
    "format flipped": (flip, "metadata.json"),
    "manifest flipped": (flip, MANIFEST),
    "manifest gone": (remove, MANIFEST),
}


def signed(damage):
    """Return the damage with checksums that hold, so that what reads the file has to find it."""

    def change(path: pathlib.Path) -> None:
        damage(path)
        manifest = path.with_name(MANIFEST)
        files = json.loads(manifest.read_text())["files"]
        sign_again(manifest, files={**files, path.name: digest(path)})

    return change


def blank(path: pathlib.Path) -> None:
    """Write zeros over the tensors of a file, and leave its size."""
    path.write_bytes(bytes(path.stat().st_size))


def backwards(path: pathlib.Path) -> None:
    """Set a counter of state.json below 0."""
    state = json.loads(path.read_text())
    state["backend"]["step_index"] = -1
    path.write_text(json.dumps(state))


SIGNED = {
    "tensors cut, signed": (signed(cut), "__1_0.distcp"),
    "tensors blank, signed": (signed(blank), "__0_0.distcp"),
    "state out of range, signed": (signed(backwards), "state.json"),
    "state cut, signed": (signed(cut), "state.json"),
    "common state cut, signed": (signed(cut), "common.pt"),
    "format cut, signed": (signed(cut), "metadata.json"),
    "metadata cut, signed": (signed(cut), ".metadata"),
    "rollouts cut, signed": (signed(cut), "rollouts_1.npz"),
}
QUICK = ("tensors cut", "tensors blank, signed")


@pytest.mark.parametrize(
    "kind", [x if x in QUICK else pytest.param(x, marks=pytest.mark.long) for x in DAMAGE | SIGNED]
)
def test_the_checkpoint_before_a_damaged_one_is_used_and_that_is_said(pool, arithmetic, whole, half, kind):
    damage, name = (DAMAGE | SIGNED)[kind]
    if not (half / "checkpoints" / name_of(2) / name).exists():
        pytest.skip(f"this release of Megatron-Core writes no {name}")
    damage(half / "checkpoints" / name_of(2) / name)
    results = run(pool, arithmetic, half, "train.num_rollouts=4")
    assert [code for code, _ in results] == [0, 0], results
    said = results[0][1]
    assert (
        (f"{name_of(2)}/{name}" in said if kind in DAMAGE else name in said or f"{name_of(2)} cannot be loaded" in said)
        and "THE CHECKPOINT BEFORE IT IS USED" in said
        and f"{name_of(1)}: 1 rollouts trained" in said
    ), said
    assert not (half / "ran").exists()
    assert_same_end(whole, half)


@pytest.mark.long(seconds=30)
def test_the_checkpoint_before_a_damaged_critics_is_used(pool, arithmetic, tmp_path):
    """The critic's tensors cannot be read, under checksums that hold: policy and critic go back together."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, rollouts in ((whole, 4), (parts, 2)):
        results = run(pool, arithmetic, folder, *PPO, f"train.num_rollouts={rollouts}")
        assert [code for code, _ in results] == [0, 0], results
    signed(blank)(parts / "checkpoints" / "critic" / name_of(2) / "__0_0.distcp")
    results = run(pool, arithmetic, parts, *PPO, "train.num_rollouts=4")
    assert [code for code, _ in results] == [0, 0], results
    assert "THE CHECKPOINT BEFORE IT IS USED" in results[0][1] and f"{name_of(1)}: 1 rollouts trained" in results[0][1]
    assert_same_end(whole, parts)
    one, two = (tensors_of(x / "checkpoints" / "critic" / name_of(4)) for x in (whole, parts))
    assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


def test_damage_ends_the_run_by_choice_with_the_files_name(pool, arithmetic, half, tmp_path):
    for kind, (damage, name) in DAMAGE.items():
        folder = shutil.copytree(half, tmp_path / kind)
        damage(folder / "checkpoints" / name_of(2) / name)
        before = (folder / "metrics.jsonl").read_text()
        results = run(pool, arithmetic, folder, "train.num_rollouts=4", "checkpoint.on_damage=fail")
        assert [code for code, _ in results] == [1, 1], results
        for _, said in results:
            assert f"{name_of(2)}/{name}" in said and "checkpoint.on_damage=previous" in said, (kind, said)
            assert "Traceback" not in said, said
        assert not (folder / "ran").exists() and (folder / "metrics.jsonl").read_text() == before


def test_two_are_passed_over_and_all_damaged_is_an_error(pool, arithmetic, whole, half):
    for iteration, name in ((2, "__0_0.distcp"), (1, "state.json")):
        flip(half / "checkpoints" / name_of(iteration) / name)
    copied = shutil.copytree(half, half.with_name("all"))
    results = run(pool, arithmetic, half, "train.num_rollouts=4")
    assert [code for code, _ in results] == [0, 0] and results[0][1].count("THE CHECKPOINT BEFORE IT IS USED") == 2, (
        results
    )
    assert_same_end(whole, half)
    flip(copied / "checkpoints" / name_of(0) / "metadata.json")
    results = run(pool, arithmetic, copied, "train.num_rollouts=4")
    assert [code for code, _ in results] == [1, 1], results
    assert all("all 3 checkpoints" in said and "checkpoint.resume=never" in said for _, said in results), results
    results = run(pool, arithmetic, copied, "train.num_rollouts=4", "checkpoint.resume=never")
    assert [code for code, _ in results] == [0, 0] and "kept as checkpoints.1" in results[0][1], results
    assert_same_end(whole, copied)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> pathlib.Path:
    return prepare_inputs(tmp_path_factory.mktemp("other"), hidden=32, layers=1, heads=1, intermediate=48)


def test_a_checkpoint_of_another_model_is_an_error_that_names_both(pool, arithmetic, half, other_model):
    before = (half / "metrics.jsonl").read_text() + "\n"
    (half / "metrics.jsonl").write_text(before)  # longer than when the checkpoint was taken: not cut back for nothing
    results = run(pool, arithmetic, half, "train.num_rollouts=4", f"model.hf_path={other_model / 'model'}")
    assert [code for code, _ in results] == [1, 1], results
    for _, said in results:
        assert "another model" in said and "hidden_size 64 there and 32 here" in said and "Traceback" not in said, said
    assert (half / "metrics.jsonl").read_text() == before


def test_an_unknown_version_is_an_error_that_names_both(pool, arithmetic, half):
    sign_again(half / "checkpoints" / name_of(2) / MANIFEST, version=9)
    results = run(pool, arithmetic, half, "train.num_rollouts=4")
    assert [code for code, _ in results] == [1, 1], results
    assert all("version 9" in said and "reads 'megatron_rl' version 2" in said for _, said in results), results


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
    """Return the pages that a save finds free.

    With them it fails at its first file, in the ranks' tensors, or at ``.metadata``.
    """
    tensors, small = (
        list(checkpoint.glob("*.distcp")),
        [x for x in checkpoint.iterdir() if x.name in ("common.pt", "state.json")],
    )
    return {
        "nothing": 0,
        "half of the tensors": pages(tensors) // 2,
        "all but .metadata": pages([*tensors, *small]) + 1,
    }[what]


def fill(disk: pathlib.Path, free_pages: int) -> pathlib.Path:
    filler, found = disk / "filler", os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_bsize - free_pages * PAGE)
    return filler


WHERE = ["nothing", "half of the tensors", "all but .metadata"]


@pytest.mark.parametrize("what", [WHERE[0], *(pytest.param(x, marks=pytest.mark.long) for x in WHERE[1:])])
def test_a_full_disk_leaves_the_last_good_checkpoint(pool, arithmetic, whole, half, small_disk, what):
    shutil.move(half / "checkpoints", small_disk / "checkpoints")
    (half / "checkpoints").symlink_to(small_disk / "checkpoints")
    filler = fill(small_disk, room_for(half / "checkpoints" / name_of(2), what))
    stopped = shutil.copytree(half, half.with_name("stopped"), symlinks=True)
    results = run(pool, arithmetic, stopped, "train.num_rollouts=4")
    assert [code for code, _ in results] == [1, 1], results
    assert all("checkpoint 3" in said and "checkpoint.on_error=continue" in said for _, said in results), results
    assert all("No space left on device" in said or "bytes are free there" in said for _, said in results), results
    assert_untouched(half)
    results = run(pool, arithmetic, half, "train.num_rollouts=4", "checkpoint.on_error=continue")
    assert [code for code, _ in results] == [0, 0], results
    assert results[0][1].count("THE RUN GOES ON") == 2 and len(rows_of(half)) == len(rows_of(whole)), results
    assert_untouched(half)
    filler.unlink()
    results = run(pool, arithmetic, half, "train.num_rollouts=4", "checkpoint.on_error=continue")
    assert [code for code, _ in results] == [0, 0], results
    assert_same_end(whole, half)


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


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_one_rank_that_cannot_write_is_told_to_all(pool, arithmetic, half, asynchronous):
    """One rank that cannot write is told to all.

    It needs no rights to mount anything: the limit stands for a quota.
    """
    given = [*SAVED, "train.num_rollouts=4", f"checkpoint.asynchronous={asynchronous}"]
    for policy, code in (("fail", 1), ("continue", 0)):
        folder = shutil.copytree(half, half.with_name(policy))
        results = pool.run(
            2,
            limited_command_line,
            arguments(arithmetic, folder, *given, f"checkpoint.on_error={policy}"),
            timeout_s=120,
        )
        assert [found for found, _ in results] == [code, code], results
        assert all("rank 1: checkpoint 3" in said and "File too large" in said for _, said in results), results
        assert_untouched(folder)
