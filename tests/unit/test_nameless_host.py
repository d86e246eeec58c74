"""A host whose own name has no address: nothing here waits for one, and the doctor names it."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

from megatron_rl.commands.launch import TORCHRUN
from tests.nameless_host import NAME, run_nameless
from tests.workers import environment

ROOT = pathlib.Path(__file__).parents[2]
RANK = """
from megatron_rl.distributed.rendezvous import meet
store, rank, world = meet(30)
print(f"met as one of {world}")
"""


@pytest.mark.distributed
def test_ranks_of_one_host_meet_where_its_name_has_no_address(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    code, said = run_nameless([*TORCHRUN, "--nproc-per-node", "2", str(script)], seconds=60)
    assert code == 0 and said.count("met as one of 2") == 2, said


@pytest.mark.process
def test_the_doctor_is_told(tmp_path: pathlib.Path) -> None:
    asks = "from megatron_rl.distributed.installation import own_name; print(own_name())"
    code, said = run_nameless([sys.executable, "-c", asks], seconds=60)
    assert code == 0 and said.strip() == f"('{NAME}', False)", said


def test_every_line_that_starts_torchrun_on_one_host_names_the_address() -> None:
    """Read all that this project starts; lines of the documents stay short, and docs/installation.md says it."""
    folders = ("examples", "megatron_rl", "tests", "tools")
    files = [path for folder in folders for end in ("py", "sh") for path in (ROOT / folder).rglob(f"*.{end}")]
    silent = []
    for path in [*files, ROOT / "Makefile"]:
        words = re.sub(r"[\s\",']+", " ", path.read_text())
        starts = re.findall(r"(?:torchrun|torch\.distributed\.run) --standalone (?!--local-addr 127\.0\.0\.1 )", words)
        silent += [str(path.relative_to(ROOT)) for _ in starts]
    assert not silent
    assert environment.TORCHRUN[1:-1] == TORCHRUN[3:]  # behind the module, torch's or ours around it
