"""All ranks write an export together: the same bits as one tensor after the other, in the bytes that the plan says."""

import json
import pathlib
from unittest import mock

import pytest
import torch
from safetensors.torch import load, load_file

from megatron_rl.errors import ConfigError, PeerError
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.model_files import RankFiles, count_model_files
from megatron_rl.storage.location import location
from megatron_rl.weights import model_folder
from megatron_rl.weights.export import load_weights
from megatron_rl.weights.file_plan import FileSizes, plan_files
from megatron_rl.weights.fused import file_tensors
from megatron_rl.weights.reader import MemoryReader
from megatron_rl.weights.shards import FileWriter, header_of
from tests.allocated import AllocationMeter
from tests.equality.rig import any_tokenizer, open_rig
from tests.equality.rows import measured, row
from tests.pairwise import quick
from tests.reference import file_weights

LIMITS = FileSizes(most_bytes=60_000, least_bytes=1)  # several files of every rank
ROWS = ("TP2-PP2-SP-EP2-ETP1 qwen3_moe", "DP2-bf16 qwen2_tied", "TP2-SP-EP2-ETP1 gpt_oss")
LONG = (*("EP2 llama4", "TP2-PP2-VPP2 llama", "TP2-SP-EP2 mixtral", "PP2-EP2 deepseek_v3", "TP2-PP2 phi3"),
        *("TP2 olmo2", "EP2-PP2-VPP2 qwen3_moe", "PP2 gemma3_text", "TP2-SP-EP2-ETP1 glm4_moe", "TP2-LoRA qwen3"),
        *("TP2-CP2 qwen2_untied", "TP2-SP-EP2-ETP1 qwen3_5_moe_text", "TP2-PP2 qwen3_5_text", "EP2 qwen3_next"))


class CountingReader(MemoryReader):
    """Counts the bytes and slices that pass through it."""

    num_bytes = calls = 0

    def read(self, *given):
        part = super().read(*given)
        self.num_bytes, self.calls = self.num_bytes + part.nbytes, self.calls + 1
        return part


def exported_by_all(rank: int, world: int, family: str, overrides: tuple[str, ...], folder: str) -> dict[str, object]:
    """Write ``folder`` with the other ranks; return what this rank loaded, sent and wrote, and what it should have."""
    path = pathlib.Path(folder)
    with open_rig(family, *overrides, layers=4) as rig:
        backend, sent, written, meter = rig.backend, [], {}, AllocationMeter()
        shape, place = backend.shape, backend.topology
        dtype = next(backend.chunks[0].module.parameters()).dtype
        reader = CountingReader({name: x.to(dtype) for name, x in file_weights(rig.model).items()})
        if not shape.lora_rank:
            load_weights([chunk.module for chunk in backend.chunks], shape, place, reader)

        def counted_send(operation, tensor, **more):
            if operation is torch.distributed.isend:
                sent.append(tensor.nbytes)
            return torch.distributed.distributed_c10d.P2POp(operation, tensor, **more)

        add = FileWriter.add

        def counted_write(writer, name, tensor):
            written.setdefault(writer, []).append(tensor.nbytes)
            add(writer, name, tensor)

        with (mock.patch.object(model_folder.dist, "P2POp", counted_send),
              mock.patch.object(FileWriter, "add", counted_write)):
            backend.save_hugging_face(path, any_tokenizer(), limits=LIMITS)
        parameters, plan = backend._exported(), plan_files(shape, place, dtype, LIMITS)
        with meter:
            for _ in model_folder.own_tensors(parameters, plan):
                pass
        own = plan.pieces.get(rank, ())
        collected = [model_folder._gathered_bytes(piece, place) for piece in own]
        laid_out = [model_folder._spare_bytes(piece, shape) for piece in own]
        degrees = degrees_of(backend.config.parallel, world)
        counted = count_model_files(shape, degrees, plan, world)
        files = [file for file in plan.files if file.owner == rank]
        assert sum(map(len, written.values())) >= len([x for f in files for x in f.tensors])
        return {
            "exported": {name: x.clone() for name, x in backend.export()},
            "paper": counted.ranks[rank],
            "real": RankFiles(
                read_bytes=reader.num_bytes,
                num_reads=reader.calls,
                written_bytes=sum(map(sum, written.values())),
                num_files=len([x for x in files if (path / x.name).is_file()]),
                sent_bytes=sum(sent),
                num_messages=len(sent),
            ),
            "files": {file.name: file.num_bytes for file in files},
            "peak_bytes": meter.peak_bytes,
            "bound_bytes": max(collected, default=0) + max(laid_out, default=0),
            "ranks": (place.pipeline_rank, place.tensor_rank, place.expert_rank, place.expert_tensor_rank),
        }


@pytest.mark.parametrize("name", quick((*ROWS, *LONG), *ROWS[1:]))
def test_written_by_all_ranks_equals_gathered_on_one(pool, tmp_path, name):
    """Names, dtypes and bits; every rank loads, sends and writes what the plan counts, in bounded memory."""
    results = measured(pool, name, exported_by_all, str(tmp_path / "hf"))
    files = {k: v for result in results for k, v in result["files"].items()}
    assert {x.name: x.stat().st_size for x in (tmp_path / "hf").glob("*.safetensors")}.keys() == files.keys()
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(files.values()) and set(index["weight_map"].values()) == set(files)
    held = {file: load_file(tmp_path / "hf" / file) for file in files}
    assert {name: file for file, tensors in held.items() for name in tensors} == index["weight_map"]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    found = file_tensors({k: v for tensors in held.values() for k, v in tensors.items()}, config["model_type"])
    lora = "LoRA" in name
    for result in results:
        wanted = result["exported"]
        assert found.keys() == wanted.keys()
        assert all(found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in wanted.items())
        assert lora or result["real"] == result["paper"]
        assert lora or result["peak_bytes"] <= result["bound_bytes"] + 64, (result["peak_bytes"], result["bound_bytes"])
        assert result["real"].num_files > 0  # all ranks write
    assert len(files) > len(results) and not (tmp_path / "hf.partial").exists()


def fails_on_one(rank: int, world: int, folder: str, broken: int) -> str:
    """Export onto a disk that is full for one rank; return the error's kind and text."""
    path = pathlib.Path(folder)

    def full(writer, name, tensor):
        raise OSError(28, "No space left on device")

    with open_rig("qwen3", *row("TP2 qwen3")[2], layers=4) as rig:
        rig.backend.save_hugging_face(path, any_tokenizer(), limits=LIMITS)
        kept = sorted(x.name for x in path.iterdir())
        add = full if rank == broken else FileWriter.add
        with mock.patch.object(FileWriter, "add", add), pytest.raises((OSError, PeerError)) as raised:
            rig.backend.save_hugging_face(path, any_tokenizer(), limits=LIMITS)
        torch.distributed.barrier()
        assert sorted(x.name for x in path.iterdir()) == kept and not path.with_name("hf.partial").exists()
        return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("broken", quick([0, 1], 1))
def test_a_full_disk_of_one_rank_fails_on_all_and_leaves_the_earlier_export(pool, tmp_path, broken):
    said = pool.run(2, fails_on_one, str(tmp_path / "hf"), broken, timeout_s=60)
    assert said[broken] == "OSError: [Errno 28] No space left on device"
    assert said[1 - broken] == f"PeerError: rank {broken} stopped with OSError: [Errno 28] No space left on device"


def writes_alone(rank: int, world: int, family: str, overrides: tuple[str, ...], folder: str) -> dict:
    """Export to a folder that each rank has for itself."""
    with open_rig(family, *overrides, layers=4) as rig, mock.patch.object(model_folder, "SEEN_S", 0.2):
        rig.backend.save_hugging_face(pathlib.Path(folder) / str(rank) / "hf", any_tokenizer(), limits=LIMITS)
        return {name: x.clone() for name, x in rig.backend.export()}


@pytest.mark.parametrize("name", quick(["TP2 qwen3", "EP2 gpt_oss"], "EP2 gpt_oss"))
def test_without_a_shared_file_system_the_main_rank_writes_the_same(pool, tmp_path, name):
    wanted = measured(pool, name, writes_alone, str(tmp_path))[0]
    found = load_file(tmp_path / "0" / "hf" / "model.safetensors")
    found = file_tensors(found, json.loads((tmp_path / "0" / "hf" / "config.json").read_text())["model_type"])
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], v) for k, v in wanted.items())
    assert not (tmp_path / "1").exists()


def into_memory(rank: int, world: int, lora: tuple[str, ...]) -> None:
    """Export into an object store of this process twice, and once onto one that fails in the middle."""
    place = location("memory://exports/step_1/hf")
    with open_rig("qwen3", *lora, layers=4) as rig:
        wanted = {name: x.clone() for name, x in rig.backend.export()}
        (place / "model-00099-of-00099.safetensors").write_bytes(b"of an export that was killed")
        order = []
        for _ in range(2):
            with mock.patch.object(type(place), "open", recorded(type(place).open, order)):
                rig.backend.save_hugging_face(place, any_tokenizer(), limits=LIMITS)
        stored = place.files()
        of_model = [name for name in order if "adapter" not in name]
        assert of_model[-1] == "config.json" and of_model.count("config.json") == 2 and ".written-by-all" not in stored
        found = {}
        for name in json.loads((place / "model.safetensors.index.json").read_text())["weight_map"].values():
            found |= load((place / name).read_bytes())
        assert found.keys() == wanted.keys() and all(torch.equal(found[k], v) for k, v in wanted.items())
        assert len([name for name in stored if name.endswith(".safetensors")]) > 3
        adapters = place.with_name("hf_adapter").files()
        assert set(adapters) == ({"adapter_config.json", "adapter_model.safetensors"} if lora else set())
        second = mock.Mock(side_effect=[mock.DEFAULT, OSError(5, "reset")], wraps=header_of)
        with mock.patch("megatron_rl.weights.shards.header_of", second), pytest.raises(OSError, match="reset"):
            rig.backend.save_hugging_face(place, any_tokenizer(), limits=LIMITS)
        assert place.files() == {}


def recorded(opened, order: list[str]):
    """Return ``open`` that notes the names that are written."""

    def noted(path, mode="rb"):
        order.extend([path.name] if mode == "wb" else [])
        return opened(path, mode)

    return noted


@pytest.mark.parametrize("lora", [(), ("lora.rank=2",)], ids=["whole", "adapters"])
def test_an_object_store_holds_the_same_and_its_config_last(pool, lora):
    """What an earlier export left goes, and an export that fails leaves nothing."""
    pool.run(1, into_memory, lora, timeout_s=60)


def not_shared(rank: int, world: int) -> str:
    with open_rig("qwen3", "parallel.tensor=2") as rig, mock.patch.object(model_folder, "SEEN_S", 0.2):
        with pytest.raises(ConfigError) as raised:
            rig.backend.save_hugging_face(location("memory://apart/hf"), any_tokenizer())
        assert location("memory://apart/hf").files() == {}
        return str(raised.value)


@pytest.mark.long
def test_a_store_of_one_process_is_refused_on_every_rank(pool):
    for said in pool.run(2, not_shared, timeout_s=60):
        assert said.startswith("memory://apart/hf is not one store for all ranks: rank 1 does not see"), said
