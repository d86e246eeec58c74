"""Checks checkpoint/folder.py: a checkpoint is whole or invisible; damage is named; pruning spares the newest."""

import json
import os
import pathlib
import random

import pytest

from megatron_rl.checkpoint import folder
from megatron_rl.checkpoint.folder import MANIFEST, DamagedCheckpoint, name_of, verify, whole_checkpoints
from megatron_rl.errors import CheckpointError
from tests.unit.checkpoint.signing import sign_again

FILES = {".metadata": b"plans", "__0_0.distcp": bytes(range(256)) * 40, "__1_0.distcp": b"tensors" * 99,
         "state.json": b'{"rollouts": 4}\n'}


def write_checkpoint(root: pathlib.Path, iteration: int = 4) -> pathlib.Path:
    """Write a whole checkpoint; of one file the writer gives the digest, as the ranks' threads do."""
    partial = folder.begin(root, iteration)
    for name, content in FILES.items():
        (partial / name).write_bytes(content)
    return folder.complete(partial, {"__0_0.distcp": folder.digest(partial / "__0_0.distcp")})


class Killed(BaseException):
    """Stands for SIGKILL: nothing that runs after it counts."""


def killed_at(number: int, monkeypatch, root: pathlib.Path) -> bool:
    """Return whether a save reached its ``number``-th call that touches the disk, at which it is killed."""
    calls: list[str] = []

    def counted(name: str):
        whole = getattr(os, name)

        def call(*args):
            if len(calls) == number:
                raise Killed
            calls.append(name)
            return whole(*args)

        return call

    with monkeypatch.context() as patched:
        for name in ("fsync", "rename", "replace"):
            patched.setattr(folder.os, name, counted(name))
        try:
            write_checkpoint(root)
        except Killed:
            return True
    assert calls.index("rename") > calls.index("replace")  # the manifest's
    return False


def test_1_a_kill_anywhere_in_complete_leaves_no_checkpoint_or_a_whole_one(tmp_path, monkeypatch):
    """That of iteration 2 stays good wherever that of 4 was killed, and the next start cleans up."""
    for number in range(100):
        root = tmp_path / str(number)
        write_checkpoint(root, 2)
        if not killed_at(number, monkeypatch, root):
            break
        for iteration in whole_checkpoints(root):
            verify(root / name_of(iteration))
        assert whole_checkpoints(root)[0] == 2
        assert (root / folder.LATEST).read_text() in ("2", str(whole_checkpoints(root)[-1]))
        write_checkpoint(root)
        verify(root / name_of(4))
        assert sorted(x.name for x in root.iterdir() if x.is_dir()) == [name_of(2), name_of(4)]
    assert number == 10, "calls that touch the disk in a save of four files, one of them digested by its writer"


def test_1_what_is_being_written_or_deleted_is_invisible_and_removed_by_begin(tmp_path):
    assert whole_checkpoints(tmp_path / "nowhere") == []
    (folder.begin(tmp_path, 4) / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "iter_0000002.deleting").mkdir()
    (tmp_path / "step_12" / "hf").mkdir(parents=True)
    assert whole_checkpoints(tmp_path) == [] and folder.begin(tmp_path, 5).name == "iter_0000005.partial"
    assert {x.name for x in tmp_path.iterdir()} == {"iter_0000005.partial", "step_12"}


def test_1_a_complete_one_is_visible_replaces_its_elder_and_is_named_as_latest(tmp_path):
    first = write_checkpoint(tmp_path)
    (first / "state.json").write_text("damaged")
    second = write_checkpoint(tmp_path)
    verify(second)
    assert first == second and whole_checkpoints(tmp_path) == [4]
    assert [x.name for x in tmp_path.iterdir() if x.is_dir()] == ["iter_0000004"]
    # the text that Megatron-LM reads
    for iteration in (0, 7, 12345678):
        write_checkpoint(tmp_path, iteration)
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
    assert whole_checkpoints(tmp_path) == [0, 4, 7, 12345678]


def test_2_a_file_that_is_cut_short_missing_or_added_is_named(tmp_path):
    for name in [*FILES, MANIFEST]:
        (write_checkpoint(tmp_path) / name).unlink()
        with pytest.raises(DamagedCheckpoint, match=name):
            verify(tmp_path / name_of(4))
    for name, content in FILES.items():
        os.truncate(write_checkpoint(tmp_path) / name, len(content) - 1)
        with pytest.raises(DamagedCheckpoint, match=f"{name} has {len(content) - 1} bytes .* says {len(content)}"):
            verify(tmp_path / name_of(4))
    (write_checkpoint(tmp_path) / "__2_0.distcp").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="__2_0.distcp is not in the manifest"):
        verify(tmp_path / name_of(4))


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_2_any_flipped_bit_is_found_and_its_file_named(tmp_path, name):
    """Tried are every bit of a short file, 60 of a long one, and 600 of the manifest."""
    checkpoint = write_checkpoint(tmp_path)
    path = checkpoint / name
    content, bits = path.read_bytes(), range(8 * path.stat().st_size)
    if len(content) >= 60:
        bits = random.Random(0).sample(bits, 600 if name == MANIFEST else 60)
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint, match=name):
            verify(checkpoint)
    path.write_bytes(content)
    verify(checkpoint)


def test_2_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path)

    def fail(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(folder, "digest", fail)
    with pytest.raises(DamagedCheckpoint, match="metadata cannot be read .*Input/output error"):
        verify(checkpoint)


def test_2_ranks_check_a_share_each_and_all_files_together(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    for name, content in FILES.items():
        (checkpoint / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        found = []
        for rank in range(3):
            try:
                verify(checkpoint, share=(rank, 3))
            except DamagedCheckpoint as error:
                found.append(str(error))
        assert len(found) == 1 and name in found[0]
        (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize(
    ("changed", "there"),
    [({"version": 3}, "format 'megatron_rl' version 3"), ({"format": "verl"}, "format 'verl' version 2")],
)
def test_an_unknown_format_or_version_is_no_damage_and_both_are_named(tmp_path, changed, there):
    checkpoint = write_checkpoint(tmp_path)
    sign_again(checkpoint / MANIFEST, **changed)
    with pytest.raises(CheckpointError, match=f"{there} .*reads 'megatron_rl' version 2") as caught:
        verify(checkpoint)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_a_manifest_of_another_tool_is_named_and_ours_without_its_digest_is_damaged(tmp_path):
    manifest = write_checkpoint(tmp_path) / MANIFEST
    content = json.loads(manifest.read_text())
    content.pop("sha256")
    manifest.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        folder.read_manifest(manifest.parent)
    manifest.write_text(json.dumps({**content, "format": "other"}))
    with pytest.raises(CheckpointError, match="format 'other' version 2 .* reads 'megatron_rl' version 2"):
        folder.read_manifest(manifest.parent)


def test_a_root_goes_with_its_last_checkpoint_and_not_with_what_a_user_put_there(tmp_path):
    root = tmp_path / "supervised"
    folder.remove_if_empty(root)
    write_checkpoint(root, 1)
    assert (root / "latest_checkpointed_iteration.txt").exists()
    folder.remove_if_empty(root)
    assert whole_checkpoints(root) == [1]
    folder.remove(root / "iter_0000001")
    (root / "notes.txt").write_text("mine")
    folder.remove_if_empty(root)
    assert (root / "notes.txt").exists()
    (root / "notes.txt").unlink()
    folder.remove_if_empty(root)
    assert not root.exists()


def test_3_prune_keeps_the_newest(tmp_path):
    for iteration in range(5):
        write_checkpoint(tmp_path, iteration)
    assert folder.prune(tmp_path, None) == [] and whole_checkpoints(tmp_path) == [0, 1, 2, 3, 4]
    assert folder.prune(tmp_path, 2) == [0, 1, 2] and whole_checkpoints(tmp_path) == [3, 4]
    assert folder.prune(tmp_path, 1) == [3]
    assert folder.prune(tmp_path, 1) == folder.prune(tmp_path, 0) == [] and whole_checkpoints(tmp_path) == [4]
    verify(tmp_path / name_of(4))


def test_3_a_folder_that_is_being_removed_is_invisible_before_it_is_incomplete(tmp_path, monkeypatch):
    for iteration in (1, 2):
        write_checkpoint(tmp_path, iteration)

    def killed(path):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(folder.shutil, "rmtree", killed)
        folder.prune(tmp_path, 1)
    assert whole_checkpoints(tmp_path) == [2] and (tmp_path / "iter_0000001.deleting" / MANIFEST).exists()
