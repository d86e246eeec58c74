"""Whole runs on a real S3 server: model, data, supervised start and critic; the dry run; the memory of a whole save."""

import pathlib
import re
import shutil
import signal

import pytest

from megatron_rl.backend import MegatronBackend
from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import folder_of, name_of, whole_checkpoints
from megatron_rl.cli import EXIT_PREEMPTED
from megatron_rl.distributed import topology
from megatron_rl.storage.location import location
from megatron_rl.storage.remote import WRITE_BYTES
from tests.equality.rig import config_of
from tests.patience import patient
from tests.reference import file_weights, tiny_config
from tests.runs.command import PPO, SAVED, arguments, ended, rows_of, told_to_leave
from tests.s3.compare import assert_same_checkpoint, assert_same_records, downloaded

BOUND_S = patient(300.0)
STARTED = ("sft.steps=4", "sft.samples_per_step=8", "sft.save_every_steps=2", "sft.eval_every_steps=2",
           "train.num_rollouts=1", "optimizer.distributed=true", "eval.every_rollouts=1",
           "optimizer.schedule=constant", "checkpoint.save_every_rollouts=1")
CRITICS = {"shared": (), "separate": ("critic.placement=separate", "critic.ranks=1")}
SIZES = dict(vocab_size=196_608, hidden=512, layers=2)  # 416 MB in one rank's file: AdamW has not stepped


def uploaded(folder: pathlib.Path, url: str) -> str:
    """Copy a file or a folder of the disk to a URL; return the URL."""
    place = location(url)
    if folder.is_file():
        place.write_bytes(folder.read_bytes())
        return url
    for path in sorted(folder.iterdir()):
        (place / path.name).write_bytes(path.read_bytes())
    return url


def test_a_run_with_model_data_and_checkpoints_in_s3_equals_one_on_disk(s3, pool, arithmetic, tmp_path):
    """A signal ends the supervised start, the host's folder is lost, and the same command ends it to the same bits."""
    tests = (f"sft.eval_path={arithmetic / 'test.jsonl'}", f"eval.path={arithmetic / 'test.jsonl'}")
    ended(pool, 2, arguments(arithmetic, tmp_path / "whole", *STARTED, *tests))
    url, run = f"s3://bucket/{tmp_path.name}", tmp_path / "run"
    model = uploaded(arithmetic / "model", f"{url}/model")
    train = uploaded(arithmetic / "train.jsonl", f"{url}/data/train.jsonl")
    test = uploaded(arithmetic / "test.jsonl", f"{url}/data/test.jsonl")
    there = (f"model.hf_path={model}", f"data.train={train}", f"sft.eval_path={test}", f"eval.path={test}",
             f"checkpoint.dir={url}/checkpoints")
    given = arguments(arithmetic, run, *STARTED, *there)
    ended(pool, 2, given, 3, run=told_to_leave, code=EXIT_PREEMPTED)
    root = folder_of(f"{url}/checkpoints")
    assert whole_checkpoints(root / "supervised") == [2, 3] and whole_checkpoints(root) == []
    shutil.rmtree(run)
    ended(pool, 2, given)
    assert whole_checkpoints(root) == whole_checkpoints(tmp_path / "whole" / "checkpoints") == [0, 1]
    assert not (root / "supervised").files()
    assert_same_records(tmp_path / "whole", run)
    assert_same_checkpoint(tmp_path / "whole" / "checkpoints", downloaded(str(root), tmp_path / "copy"), 1)
    exports = downloaded(f"{url}/checkpoints/step_{len(rows_of(run))}/hf", tmp_path / "hf")
    whole = next((tmp_path / "whole" / "checkpoints").glob("step_*/hf"))
    assert (exports / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("placement", CRITICS)
def test_a_critics_checkpoints_in_s3_are_those_of_a_disk(nursery, door, arithmetic, tmp_path, placement):
    """Both ranks are killed while the critic's second checkpoint is sent, and the host's folder is lost with them."""
    given = (*PPO, *SAVED, *CRITICS[placement], "train.export_last=false", "train.num_rollouts=3")
    ran(nursery, arguments(arithmetic, tmp_path / "whole", *given), tmp_path / "first")
    url, run = f"s3://bucket/{tmp_path.name}/checkpoints", tmp_path / "run"
    in_s3 = arguments(arithmetic, run, *given, f"checkpoint.dir={url}")
    door.hold = f"PUT /bucket/{tmp_path.name}/checkpoints/critic/{name_of(2)}/__".encode()
    with nursery.ranks(2, in_s3, tmp_path / "killed") as ranks:
        assert door.held.wait(BOUND_S), ranks.said()[-6000:]
        for fork in ranks.forks:
            fork.send_signal(signal.SIGKILL)
        ranks.wait(BOUND_S)
    door.open()
    root = folder_of(url)
    assert whole_checkpoints(root / "critic") == [0, 1]
    shutil.rmtree(run)
    assert f"{root / name_of(1)}: 1 rollouts trained" in ran(nursery, in_s3, tmp_path / "again")
    assert whole_checkpoints(root) == whole_checkpoints(root / "critic") == [0, 1, 2, 3]
    assert_same_records(tmp_path / "whole", run)
    there, whole = downloaded(url, tmp_path / "copy"), tmp_path / "whole" / "checkpoints"
    assert_same_checkpoint(whole, there, 3)
    assert_same_checkpoint(whole / "critic", there / "critic", 3)


def ran(nursery, given: list[str], folder: pathlib.Path) -> str:
    with nursery.ranks(2, given, folder) as ranks:
        assert ranks.wait(BOUND_S) == [0, 0], ranks.said()[-6000:]
        return ranks.said()


@pytest.mark.parametrize(("bucket", "code"), [("bucket", 0), ("nosuch", 2)])
def test_a_dry_run_looks_at_the_store_and_leaves_nothing_there(s3, pool, arithmetic, tmp_path, bucket, code):
    url = f"s3://bucket/{tmp_path.name}"
    there = (f"model.hf_path={uploaded(arithmetic / 'model', f'{url}/model')}",
             f"data.train={uploaded(arithmetic / 'train.jsonl', f'{url}/train.jsonl')}")
    before = location(url).files()
    there = (*there, f"checkpoint.dir=s3://{bucket}/{tmp_path.name}", "--dry-run")
    (said,) = ended(pool, 1, arguments(arithmetic, tmp_path / "run", *there), code=code)
    assert ("there is no such bucket" in said) == bool(code) and "Traceback" not in said, said
    assert location(url).files() == before and not (tmp_path / "run").exists()


def peak_of_a_save(rank: int, world: int, roots: list[str]) -> list[int]:
    """Save one model to each root in turn; return the bytes by which each save raised the process's memory at most."""
    hf_config = tiny_config("qwen3", **SIZES)
    from transformers import AutoModelForCausalLM

    weights = file_weights(AutoModelForCausalLM.from_config(hf_config))
    backend, peaks = MegatronBackend(config_of(), hf_config=hf_config, weights=weights, total_steps=1), []
    del weights
    try:
        for root in roots:
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
            before = memory_of("VmRSS")
            model_state.save(backend, folder_of(root), 1, {"state.json": "{}"}).finish()
            peaks.append(memory_of("VmHWM") - before)
    finally:
        backend.close(leave_world=False)
        topology.destroy()
    return peaks


def memory_of(name: str) -> int:
    """Return a figure of this process's memory in bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1])


def test_a_whole_save_to_s3_takes_the_memory_of_one_to_a_disk_and_a_few_parts(s3, pool, tmp_path):
    """The first save to each warms its code up; the file is twelve parts."""
    roots = [str(tmp_path / "disk"), f"s3://bucket/{tmp_path.name}"]
    (peaks,) = pool.run(1, peak_of_a_save, [*roots, *roots], timeout_s=240)
    file = max(folder_of(roots[1]).files().values())
    disk, store = peaks[2:]
    print(peaks, file)
    assert file > 10 * WRITE_BYTES and disk > file / 2, (peaks, file)
    assert store - disk < 6 * WRITE_BYTES, (peaks, file)
