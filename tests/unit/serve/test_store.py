"""The server's file holds what was written, for another process too, and says what a crash has lost."""

import pathlib
import subprocess
import sys

import pytest

from megatron_rl.config import ServeConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.serve.coordinator import Coordinator, restore_lines
from megatron_rl.serve.naming import CheckpointPath
from megatron_rl.serve.operations import Operations
from megatron_rl.serve.registry import Registry
from megatron_rl.serve.store import ACCEPTED, DONE, FAILED, OperationRow, Store
from megatron_rl.serve.values import Message, Outcome, RequestError
from tests.patience import patient

START = {"seq": 0, "folder": None, "with_adam": False}


def registry_of(folder: pathlib.Path) -> Registry:
    return Registry(Store(folder / "serve.sqlite"), folder / "checkpoints")


def model_of(registry: Registry, owner: str = "o") -> str:
    session = registry.open_session(owner, {"sdk_version": "0.38.0"})
    model = f"{session}:train:0"
    registry.open_model(model, owner, session, {"spec": None, "saved": START, "base_model": "b", "metadata": {}})
    return model


def write(registry: Registry, model: str, *kinds_and_states: tuple[str, str]) -> None:
    for seq, (kind, state) in enumerate(kinds_and_states):
        row = OperationRow(id=f"{model}:{seq}", owner="o", line=model, seq=seq, kind=kind, digest="d", state=ACCEPTED)
        registry.store.accept(row)
        if state != ACCEPTED:
            registry.store.end(row.id, state)


@pytest.mark.parametrize("damage", [b"no database at all", None])
def test_a_damaged_file_is_named_with_a_way_out(tmp_path: pathlib.Path, damage: bytes | None) -> None:
    registry = registry_of(tmp_path)
    model_of(registry)
    registry.store.close()
    file = tmp_path / "serve.sqlite"
    if damage is None:  # a row that is no JSON
        Store(file)._file.execute("UPDATE models SET facts = '{'")
    else:
        file.write_bytes(damage * 300)
    with pytest.raises(CheckpointError, match=r"serve\.sqlite, which holds .* cannot be read: .* move it away"):
        Store(file)


def test_rows_outlive_the_process_that_wrote_them(tmp_path: pathlib.Path) -> None:
    code = (
        "import os, pathlib, signal, sys; from megatron_rl.serve.store import Store\n"
        "store = Store(pathlib.Path(sys.argv[1]))\n"
        "store.put('sessions', 's', 'o', '', {'a': 1}); store.update('sessions', 's', b=[2])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "serve.sqlite"
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=patient(120), check=False)
    assert done.returncode == -9
    assert Store(path).get("sessions", "s").facts == {"a": 1, "b": [2]}


def test_an_owner_sees_its_own_rows_alone_no_expired_checkpoint_and_no_finished_session(tmp_path: pathlib.Path) -> None:
    registry = registry_of(tmp_path)
    mine, other = model_of(registry, "me"), model_of(registry, "you")
    assert [row.id for row in registry.store.of_owner("models", "me")] == [mine]
    with pytest.raises(RequestError, match="is not known here, or is another client's") as refused:
        registry.model(other, "me")
    assert refused.value.status == 404
    registry = registry_of(tmp_path)
    path = CheckpointPath(model=model_of(registry), kind="weights", name="a")
    registry.note_checkpoint(path, "o", seq=1, ttl_s=-1.0, metadata=None)
    with pytest.raises(RequestError, match="has expired"):
        registry.checkpoint(str(path), "o")
    assert [row.id for row in registry.expired()] == [str(path)]
    registry = registry_of(tmp_path)
    session = registry.open_session("o", {})
    registry.finish_session(session, "o")
    with pytest.raises(RequestError, match="was finished") as refused:
        registry.session(session, "o")
    assert refused.value.status == 410 and registry.known_session(session, "o").id == session


def test_a_restart_names_what_was_lost_since_the_last_save(tmp_path: pathlib.Path) -> None:
    registry = registry_of(tmp_path)
    model = model_of(registry)
    kinds = ("create_model", "forward_backward", "optim_step", "save_weights", "forward")
    write(registry, model, *((kind, DONE) for kind in kinds))
    registry.note_saved(model, 3, tmp_path, with_adam=True)
    assert registry_of(tmp_path).lost_words(model) is None  # a forward pass moves nothing
    ends = [("forward_backward", DONE), ("forward_backward", FAILED), ("optim_step", ACCEPTED)]
    write(registry, model, *[("forward", DONE)] * 5, *ends)
    words, _ = registry_of(tmp_path).lost_words(model)
    assert "its state after request 3; lost: forward_backward 5, optim_step 7." in words
    assert registry.next_seq(model) == 8
    header = registry.restore_header(model)
    assert header == {"do": "load", "model": model, "folder": str(tmp_path.absolute()), "with_adam": True}


def test_a_model_without_a_save_starts_anew(tmp_path: pathlib.Path) -> None:
    registry = registry_of(tmp_path)
    model = model_of(registry)
    write(registry, model, ("create_model", DONE), ("forward_backward", DONE))
    words, _ = registry.lost_words(model)
    assert "goes on from its start; lost: forward_backward 1." in words
    assert registry.restore_header(model) == {"do": "create", "model": model, "spec": None}
    queue = Operations(gap_s=1, queue_s=1, max_bytes=1, max_batch=1)
    assert restore_lines(registry, queue) == 1 and queue.failure_of(model)[0] == words


def test_a_models_own_save_never_overwrites_the_one_that_it_would_go_on_from(tmp_path: pathlib.Path) -> None:
    registry = registry_of(tmp_path)
    model, written, kept = model_of(registry), [], []

    def run(message: Message) -> Outcome:
        written.append(message.header["folder"])
        kept.append(registry.store.get("models", model).facts["saved"]["folder"])
        return Outcome()

    coordinator = Coordinator(ServeConfig(), registry, None, None, run)
    for seq in range(1, 5):
        coordinator._save_own(model, seq)
        assert registry.restore_header(model)["folder"] == written[-1]
    assert all(folder != before for folder, before in zip(written, kept, strict=True)) and len(set(written)) == 2
