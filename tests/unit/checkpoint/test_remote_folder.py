"""Checks checkpoint/remote_folder.py on memory://: what is whole, seen and removed equals a disk's folder."""

import contextlib
import uuid

import pytest

from megatron_rl.checkpoint import folder as on_disk
from megatron_rl.checkpoint.folder import (
    LATEST,
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    folder_of,
    name_of,
    prune,
    read_manifest,
    remove,
    remove_if_empty,
    verify,
    whole_checkpoints,
)
from megatron_rl.checkpoint.remote_folder import RemotePlace
from megatron_rl.errors import StoreError
from megatron_rl.storage import remote

FILES = {"__0_0.distcp": b"tensors", STATE: b'{"rollouts": 3}\n', "rollouts_0.npz": bytes(range(256))}


@pytest.fixture
def root():
    place = folder_of(f"memory://{uuid.uuid4().hex}/checkpoints")
    yield place
    place.remove_tree()


def sent(root, iteration: int) -> tuple[RemotePlace, dict]:
    """Return a checkpoint whose files are uploaded and which is not whole yet, with their digests."""
    place = RemotePlace(root, iteration)
    place.begin()
    digests = {name: place.write_file(name, content) for name, content in FILES.items()}
    (place.scratch / ".metadata").write_bytes(b"index")
    return place, digests


def saved(root, iteration: int):
    """Return the folder of a whole checkpoint."""
    place, digests = sent(root, iteration)
    place.complete(digests)
    place.close()
    return root / name_of(iteration)


def saved_on_disk(root, iteration: int):
    folder = on_disk.begin(root, iteration)
    for name, content in {**FILES, ".metadata": b"index"}.items():
        (folder / name).write_bytes(content)
    return on_disk.complete(folder, {})


def test_a_manifest_equals_that_of_the_same_files_on_a_disk(root, tmp_path) -> None:
    remote, local = saved(root, 30), saved_on_disk(tmp_path, 30)
    assert read_manifest(remote) == read_manifest(local)
    verify(remote)
    verify(local)
    assert (root / LATEST).read_text() == (tmp_path / LATEST).read_text() == "30"


def test_what_is_whole_equals_a_disk_after_every_save_and_pruning(root, tmp_path) -> None:
    for iteration in (0, 10, 20, 10, 40):
        saved(root, iteration)
        saved_on_disk(tmp_path, iteration)
        assert whole_checkpoints(root) == whole_checkpoints(tmp_path)
        assert prune(root, 2) == prune(tmp_path, 2)
        assert whole_checkpoints(root) == whole_checkpoints(tmp_path)
    assert set(root.children()) == {name_of(20), name_of(40), LATEST}


def test_a_folder_without_its_manifest_is_not_seen_and_goes_with_the_next_save(root) -> None:
    saved(root, 10)
    sent(root, 20)[0].close()
    assert (root / name_of(20) / STATE).is_file() and whole_checkpoints(root) == [10]
    saved(root, 30)
    assert set(root.children()) == {name_of(10), name_of(30), LATEST}


def test_an_older_checkpoint_of_the_same_number_is_gone_before_the_new_one_is_written(root) -> None:
    saved(root, 10)
    saved(root, 20)
    place, _ = sent(root, 20)
    assert whole_checkpoints(root) == [10]
    place.abandon()
    assert set(root.children()) == {name_of(10), LATEST}


@pytest.mark.parametrize("change", ["cut", "gone", "added"])
def test_a_checkpoint_is_not_whole_if_the_store_lacks_what_was_sent(root, change: str) -> None:
    place, digests = sent(root, 10)
    match change:
        case "cut":
            (place.folder / STATE).write_bytes(FILES[STATE][:-1])
        case "gone":
            (place.folder / STATE).unlink()
        case "added":
            (place.folder / "__1_0.distcp").write_bytes(b"of another run")
    with pytest.raises(StoreError, match=r"were sent.*__1_0" if change == "added" else "were sent.*state.json"):
        place.complete(digests)
    assert whole_checkpoints(root) == []
    place.abandon()
    assert not root.children() and not place.scratch.exists()


def test_the_manifest_is_written_last_and_removed_first(root, monkeypatch) -> None:
    calls: list[tuple[str, str]] = []
    system = type(root.system)
    opened, removed, removed_all = system._open, system.rm_file, system.rm
    names = {"open": opened, "rm_file": removed, "rm": removed_all}

    def noted(name):
        def call(self, path, *given, **named):
            if name != "open" or (given and given[0] == "wb") or named.get("mode") == "wb":
                calls.append((name, str(path).rpartition("/")[2]))
            return names[name](self, path, *given, **named)

        return call

    monkeypatch.setattr(system, "_open", noted("open"))
    saved(root, 10)
    written = [name for call, name in calls if call == "open"]
    assert written[-2:] == [MANIFEST, LATEST] and set(written[:-2]) == {*FILES, ".metadata"}
    calls.clear()
    monkeypatch.setattr(system, "rm_file", noted("rm_file"))
    monkeypatch.setattr(system, "rm", noted("rm"))
    remove(root / name_of(10))
    assert calls[0] == ("rm_file", MANIFEST) and whole_checkpoints(root) == []


class Killed(BaseException):
    """Stands for SIGKILL: nothing that runs after it counts."""


def killed_at(number: int, root, monkeypatch) -> bool:
    """Return whether a save with pruning reached its ``number``-th request to the store, at which it is killed."""
    asked, answered = 0, remote.answered

    def counted(call, path):
        nonlocal asked
        asked += 1
        if asked > number:
            raise Killed
        return answered(call, path)

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(remote, "answered", counted)
        saved(root, 20)
        prune(root, 1)
        return False
    # memory:// shows an object when its upload begins; a store does when it ends
    for name in [name for name, size in root.files().items() if not size]:
        (root / name).unlink()
    return True


def test_a_save_killed_at_any_request_leaves_a_whole_checkpoint_and_the_next_one_clears_up(root, monkeypatch) -> None:
    number = 0
    while True:
        saved(root, 10)
        if not killed_at(number, root, monkeypatch):
            break
        whole = whole_checkpoints(root)
        assert whole in ([10], [10, 20], [20])
        for iteration in whole:
            verify(root / name_of(iteration))
        saved(root, 30)
        assert set(root.children()) == {*map(name_of, whole), name_of(30), LATEST}
        root.remove_tree()
        number += 1
    assert number > 20  # requests of a save and its pruning


@pytest.mark.parametrize("name", [*FILES, ".metadata", MANIFEST])
def test_damage_is_named(root, name: str) -> None:
    folder = saved(root, 10)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))
    with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
        verify(folder)


def test_the_latest_goes_with_the_last_checkpoint(root) -> None:
    folder = saved(root, 10)
    remove_if_empty(root)
    assert whole_checkpoints(root) == [10]
    remove(folder)
    remove_if_empty(root)
    assert not root.children()
