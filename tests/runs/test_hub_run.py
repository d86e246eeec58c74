"""Runs whose model and data are names on the hub, from a mirror of it: those of local folders, to the bit."""

import os
import pathlib
import subprocess
import sys

import pytest

from megatron_rl.config import load_config
from tests.hub_mirror import Mirror, commit, mirrored
from tests.runs.command import arguments, assert_same_run


def ran(command: list[str], mirror: Mirror, home: pathlib.Path, code: int = 0, **more: str) -> str:
    """Run a command whose hub is the mirror, which must end with ``code``; return what it said."""
    given = os.environ | {"HF_ENDPOINT": mirror.url, "HF_HOME": str(home)} | more
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_run_of_the_hubs_names_equals_one_of_local_paths(arithmetic, tmp_path):
    """On two ranks of a node; it resumes without a network after the branch moved; a dry run takes no weights."""
    model = {x.name: x.read_bytes() for x in (arithmetic / "model").iterdir()}
    rows = (arithmetic / "train.jsonl").read_bytes()
    home, local, run = tmp_path / "home", tmp_path / "local", tmp_path / "hub"
    two = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--local-addr", "127.0.0.1"]
    train = ["-m", "megatron_rl.train"]
    saved = ("checkpoint.save_every_rollouts=1", "optimizer.schedule=constant")
    names = ("model.hf_path=me/tiny", "data.train=me/sums", *saved)
    with mirrored() as mirror:
        mirror.push("models", "me/tiny", model | {"pytorch_model.bin": b"a pickle"})
        mirror.push("datasets", "me/sums", {"train.jsonl": rows, "test.jsonl": b'{"prompt": "no"}\n'})
        dry = [sys.executable, *train, "--dry-run", "--nodes", "1"]
        said = ran([*dry, *arguments(arithmetic, run, *names)], mirror, home)
        assert "on 8 GPUs" in said and not run.exists() and "model.safetensors" not in mirror.downloads()
        ran([*two, *train, *arguments(arithmetic, run, *names)], mirror, home)
        assert set(mirror.downloads().values()) == {1} and "test.jsonl" not in mirror.downloads()
        mirror.push("models", "me/tiny", {"config.json": b"{}"})
        asked = mirror.asked.total()
        more = ("train.num_rollouts=3", *names)
        ran([*two, *train, *arguments(arithmetic, run, *more)], mirror, home, HF_HUB_OFFLINE="1")
        assert mirror.asked.total() == asked
        for name, words in (("me/none", "shows no model of that name"), ("me/tiny@v9", "no revision 'v9' of it")):
            wrong = [*two, *train, *arguments(arithmetic, tmp_path / "x", f"model.hf_path={name}")]
            said = ran(wrong, mirror, home, code=1)
            assert said.count("megatron_rl: model.hf_path=") == 1 and words in said
    ran([*two, *train, *arguments(arithmetic, local, "train.num_rollouts=3", *saved)], mirror, home)
    assert_same_run(local, run, files=("trace.jsonl",))
    written = load_config(run / "config.yaml")
    assert written.model.hf_path == f"me/tiny@{commit(0)}"
    assert written.data.train == (f"me/sums:default/train@{commit(0)}",)
