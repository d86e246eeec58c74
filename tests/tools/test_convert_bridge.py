"""Our tables equal those of NVIDIA megatron-bridge, where ``make test-bridge`` has installed it (docs/models.md)."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.patience import patient
from tests.tools import ROOT

pytestmark = pytest.mark.process


def test_the_tables_are_those_of_megatron_bridge() -> None:
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed")
    command = [sys.executable, "-m", "tests.bridge_oracle"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(600), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {family: differences for family, (_, differences) in found.items()} == dict.fromkeys(found, [])
    # the least: two layers of six, the embedding, the last norm and the output
    assert len(found) == 6 and min(count for count, _ in found.values()) == 15
