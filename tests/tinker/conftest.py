"""A server of two processes with PP=2 for the session, and the folder in which recipes find what they ask a hub for."""

import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.patience import patient, until
from tests.runs.command import ROOT
from tests.tinker.workplace import CHAT, make_workplace
from tests.workers.environment import TORCHRUN

pytest.importorskip("tinker", reason="Tinker's SDK is not installed; `make test-tinker` installs it")
START_S, END_S = 120.0, 60.0
OWN_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "TINKER_TELEMETRY": "0"}
OWN_ENVIRONMENT |= {"TINKER_API_KEY": "tml-test"}
SETTINGS = "run: {deadline_s: 120}\nparallel: {pipeline: 2}\nlora: {rank: 32}\nserve: {port: 0, max_models: 64}\n"


@contextmanager
def served(folder: pathlib.Path, model: pathlib.Path, *overrides: str) -> Iterator[str]:
    """Serve within the block by torchrun, as a user does; yield the address."""
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "server.yaml", folder / "server.log"
    config.write_text(SETTINGS)
    command = [sys.executable, "-m", *TORCHRUN, "2"]
    command += ["-m", "megatron_rl.serve", "--config", str(config), "--run-dir", str(folder / "run")]
    command += [f"model.hf_path={model}", f"serve.base_model={CHAT}", *overrides]
    environment = {**os.environ, **OWN_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with log.open("w") as said:
        own = dict(cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        server = subprocess.Popen(command, **own)
    said_where = re.compile(r"serving .* at (http://[\d.:]+)")
    try:
        assert until(lambda: said_where.search(log.read_text()) or server.poll() is not None, START_S), log.read_text()
        assert (found := said_where.search(log.read_text())), log.read_text()
        yield found[1]
        assert server.poll() is None, log.read_text()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(patient(END_S))
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory) -> pathlib.Path:
    return make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="session")
def address(workplace, tmp_path_factory) -> Iterator[str]:
    """Return the address of a server that every test of the session may use."""
    with served(tmp_path_factory.mktemp("server"), workplace / CHAT) as found:
        yield found


@pytest.fixture(autouse=True)
def own_environment(monkeypatch) -> None:
    for name, value in OWN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
