"""Checks checkpoint/pickled.py: nothing runs that a checkpoint or a rank names; the lists hold what is met alone."""

import builtins
import io
import os
import pathlib
import pickle
import pickletools
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType

from megatron_rl.checkpoint import pickled
from megatron_rl.checkpoint.folder import DamagedCheckpoint
from megatron_rl.checkpoint.pickle_scan import MOST_DEPTH, PARTS_PER_BYTE, _Machine
from megatron_rl.checkpoint.pickled import BETWEEN_RANKS, MetadataUnpickler, PlanUnpickler, check_pickle, guarded

# Megatron-Core 0.19.2's common_state; 0.16.1 has common.pt
OBJECTS = {("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")}
# sent by 0.16.1 alone
LOADS = {("torch.distributed.checkpoint.planner", name) for name in ("LoadPlan", "ReadItem", "LoadItemType")}


class Planted:
    """Pickles as a call that leaves a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Recording:
    """Takes the place of an unpickler's ``allows``, and records the names that it is asked for."""

    def __init__(self, of: type[MetadataUnpickler]) -> None:
        self.names: set[tuple[str, str]] = set()
        self.of, self.allows = of, of.allows
        of.allows = lambda unpickler, module, name: (self.names.add((module, name)),
                                                     self.allows(unpickler, module, name))[1]

    def end(self) -> list[tuple[str, str]]:
        self.of.allows = self.allows
        return sorted(self.names)


def save_and_load(rank: int, world: int, root: str, family: str, *given: str) -> tuple[list, list]:
    """Return the names in ``.metadata`` and in the other ranks' plans, in a save after a step and a load."""
    from megatron_rl.checkpoint import model_state
    from tests.equality.rig import sizes
    from tests.equality.saved_steps import SHARDED, open_like, take_steps

    between = Recording(PlanUnpickler)
    with open_like((*sizes(1, 1), *SHARDED, *given), family) as rig:
        take_steps(rig, 1)
        path = model_state.save(rig.backend, pathlib.Path(root), 1, {"state.json": "{}"}).finish()
        on_disk = Recording(MetadataUnpickler)
        model_state.load(rig.backend, path, model_state.numbers(rig.backend), model_state.identity(rig.backend))
    return on_disk.end(), between.end()


def flat(lists: dict[str, set[str]]) -> set[tuple[str, str]]:
    return {(module, name) for module, names in lists.items() for name in names}


def without_dtypes(names) -> set[tuple[str, str]]:
    return {(module, name) for module, name in map(tuple, names) if module != "torch" or name not in pickled.DTYPES}


@pytest.fixture(scope="module")
def met(pool, tmp_path_factory) -> tuple[pathlib.Path, set, set]:
    """Return a real checkpoint's folder, and the names met on disk and between ranks."""
    on_disk, between = set(), set()
    for family, given in (("qwen2_tied", ()), ("qwen3_moe", ("parallel.expert=2", "model.dtype=bfloat16"))):
        root = tmp_path_factory.mktemp(family)
        for disk, ranks in pool.run(2, save_and_load, str(root), family, *given, timeout_s=120):
            on_disk |= without_dtypes(disk)
            between |= without_dtypes(ranks)
    return root / "iter_0000001", on_disk, between


def test_a_real_checkpoint_and_what_ranks_send_name_one_list_each_and_no_more(met):
    folder, on_disk, _ = met
    assert check_pickle(folder / ".metadata").state_dict_metadata
    assert flat(pickled.ALLOWED) - OBJECTS <= on_disk <= flat(pickled.ALLOWED), flat(pickled.ALLOWED) ^ on_disk
    _, _, between = met
    own = flat(BETWEEN_RANKS)
    assert not own & flat(pickled.ALLOWED) and between - flat(pickled.ALLOWED) <= own, (
        between - own - flat(pickled.ALLOWED)
    )
    assert own - LOADS - flat(pickled.OF_ERRORS) <= between, own - between


def test_no_list_holds_what_could_run():
    """Of Python's own modules that can run things none is named, and of its built-ins exceptions alone."""
    held = flat(pickled.ALLOWED) | flat(BETWEEN_RANKS)
    modules = {module.split(".")[0] for module, _ in held}
    assert not modules & {"os", "posix", "subprocess", "importlib", "functools", "operator", "shutil"}
    of_python = {name for module, name in held if module == "builtins"}
    assert not of_python & {"eval", "exec", "getattr", "open", "__import__"}
    assert all(issubclass(vars(builtins)[name], BaseException) for name in BETWEEN_RANKS.get("builtins", ()))


def test_a_planted_call_is_refused_and_does_not_run(tmp_path):
    path = tmp_path / ".metadata"
    for content in (Planted(tmp_path / "ran"), {"state": [Planted(tmp_path / "ran")]}):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(DamagedCheckpoint, match=r"metadata is refused: it names posix\.system"):
            check_pickle(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"no pickle at all", pickle.dumps(np.zeros(3))[:-20]])
def test_what_is_no_pickle_is_refused(tmp_path, content):
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="metadata is refused"):
        check_pickle(path)
    with pytest.raises(DamagedCheckpoint, match="nowhere is refused"):
        check_pickle(tmp_path / "nowhere")


def load_poisoned(rank: int, world: int, root: str, ran: str) -> str:
    """Load a checkpoint with a call in the place of a weight; return the error.

    Its metadata, of allowed classes alone, says that the weight is an object, of the weight's size, which Megatron-Core
    compares first; the object is the call. Without ``guarded`` the call runs (0.16.1).
    """
    from megatron_rl.checkpoint import model_state
    from tests.equality.rig import sizes
    from tests.equality.saved_steps import PLAIN, open_like

    with open_like((*sizes(1, 1), *PLAIN), "llama") as rig:
        path = model_state.save(rig.backend, pathlib.Path(root), 1, {}).finish()
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
        with (path / ".metadata").open("rb") as file:
            metadata = pickle.load(file)
        torch.save(Planted(pathlib.Path(ran)), path / "planted.distcp")
        key, size = "embedding.word_embeddings.weight", (path / "planted.distcp").stat().st_size
        planted = BytesStorageMetadata()
        planted.size = metadata.state_dict_metadata[key].size
        metadata.state_dict_metadata[key] = planted
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo("planted.distcp", 0, size)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        check_pickle(path / ".metadata")
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        try:
            model_state.load(rig.backend, path, kept, model)
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            return f"{type(error).__name__}: {error}"
        finally:
            assert os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") == "1"  # guarded puts back what it found
    return "loaded"


def test_an_object_in_a_tensors_place_and_a_call_from_another_rank_do_not_run(pool, tmp_path):
    (said,) = pool.run(1, load_poisoned, str(tmp_path / "checkpoints"), str(tmp_path / "ran"), timeout_s=60)
    assert said.startswith("DamagedCheckpoint") and "\n" not in said, said
    assert "weights_only" in said.lower().replace(" ", "_"), said
    assert not (tmp_path / "ran").exists()
    for said in pool.run(2, send_planted, str(tmp_path / "ran"), timeout_s=30):
        assert "names posix.system" in said
    assert not (tmp_path / "ran").exists()


def send_planted(rank: int, world: int, ran: str) -> str:
    received = [None, None]
    with guarded():
        try:
            dist.all_gather_object(received, Planted(pathlib.Path(ran)) if rank == 1 else torch.Size([3]))
        except pickle.UnpicklingError as error:
            return str(error)
    return "received"


def declared(opcode: bytes, size: bytes) -> bytes:
    return b"\x80\x04" + opcode + size + b"abc."


METADATA_INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
DOUBLED = b")\x94" + b"".join(b"h%b\x86\x94" % bytes([i]) for i in range(60))  # each tuple holds the one before twice


@pytest.mark.parametrize(("content", "words"), [
    pytest.param(declared(b"\x8e", (1 << 40).to_bytes(8, "little")), "expected 1099511627776 bytes", id="bytes"),
    pytest.param(declared(b"\x8d", (1 << 40).to_bytes(8, "little")), "only 4 remain", id="text"),
    pytest.param(b"\x80\x04Nr" + (1 << 31).to_bytes(4, "little") + b".", "a memo of 2147483649 places", id="memo"),
    pytest.param(b"\x80\x04" + b"]" * 100 + b"a" * 99 + b".", "nests more than 64 deep", id="lists"),
    pytest.param(b"\x80\x04})" + b"\x85" * 300_000 + b"Ns.", "nests more than 64 deep", id="tuples"),
    pytest.param(b"\x80\x04}" + DOUBLED + b"Ns.", "parts, by references to the same ones", id="doubled"),
    pytest.param(b"\x80\x04N" + b"2" * 99 + b".", "the opcode DUP", id="copies"),
    pytest.param(b"\x80\x04" + METADATA_INDEX + b"N}\x8c\x03fqnNs\x86b.", "shared or global", id="a class changed"),
    pytest.param(b"\x80\x04]\x94h\x00a.", "shared or global", id="a list within itself"),
    pytest.param(b"\x80\x04a.", "more values than there are", id="nothing to take"),
    pytest.param(b"\x80\x04" + b"N" * 2**20 + b".", "an index of the tensors beside it at most 1048576", id="size"),
])
def test_a_pickle_that_would_take_memory_or_time_is_refused_before_it_is_read(tmp_path, monkeypatch, content, words):
    monkeypatch.setattr(MetadataUnpickler, "load", lambda _: pytest.fail("it is unpickled"), raising=False)
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"metadata is refused: .*{words}"):
        check_pickle(path)


def test_real_indexes_are_far_from_the_bounds(met):
    """A real checkpoint's index is smaller than its tensors' files, shallow, and refers to few things again."""
    folder, _, _ = met
    content = (folder / ".metadata").read_bytes()
    machine, deepest = _Machine(PARTS_PER_BYTE * len(content)), 0
    for opcode, argument, _ in pickletools.genops(content):
        machine.run(opcode.name, argument)
        deepest = max([deepest, *(value.depth for value in machine.stack)])
    (whole,) = machine.stack
    data = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    print(f"{len(content)} bytes beside {data} of tensors, {whole.parts} parts, {deepest} deep")
    assert len(content) < data / 2 and whole.parts < len(content) and deepest < MOST_DEPTH / 2


class AsDebian12:
    """Pickles as a call of ``getattr``, as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, kind: object, name: object) -> None:
        self.given = (kind, name)

    def __reduce__(self):
        return getattr, self.given


def test_getattr_in_a_pickle_gives_members_of_allowed_enums_and_nothing_else() -> None:
    def load(kind: object, name: object, unpickler: type[MetadataUnpickler] = PlanUnpickler) -> object:
        return unpickler(io.BytesIO(pickle.dumps(AsDebian12(kind, name)))).load()

    assert load(WriteItemType, "SHARD") is WriteItemType.SHARD
    assert load(LoadItemType, "TENSOR") is LoadItemType.TENSOR
    preserve = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    assert load(_MEM_FORMAT_ENCODING, preserve.name, MetadataUnpickler) is preserve
    refused = [(WriteItemType, "__class__"), (WriteItemType, "mro"), (MetadataIndex, "__init__"), ("text", "format")]
    for kind, name in refused:
        with pytest.raises(pickle.UnpicklingError, match="a member of no enum that is known"):
            load(kind, name)
    with pytest.raises(pickle.UnpicklingError, match="names signal.Signals"):  # an enum that is not in the lists
        load(signal.Signals, "SIGKILL")
