"""Convert between Hugging Face directories and Megatron checkpoints, a tensor at a time, on a CPU.

Examples:
  megatron-rl convert import    /models/qwen3-8b checkpoints/qwen3-8b --tp 2 --pp 2
  megatron-rl convert import    --gguf model.Q4_1.gguf /models/smollm2 --dtype bfloat16
  megatron-rl convert export    checkpoints/run-7 /models/run-7 --dtype bfloat16
  megatron-rl convert roundtrip /models/qwen3-8b --check-logits
  megatron-rl convert inspect   checkpoints/run-7

A Megatron checkpoint is Megatron-LM's folder: latest_checkpointed_iteration.txt and release/ or
iter_*/ with torch_dist files. Any topology loads it, however --tp, --pp and --ep have divided it.
The exit code is 0 for success, with every comparison equal, and 1 if a comparison differs. It is 2,
with the reason as a message, if the command cannot be done. docs/conversion.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

DTYPES = ("float32", "bfloat16", "float16")
EXAMPLES = {
    "import": "example: megatron-rl convert import /models/qwen3-8b checkpoints/qwen3-8b --tp 2 --pp 2",
    "export": "example: megatron-rl convert export checkpoints/run-7 /models/run-7 --iteration 400",
    "roundtrip": "example: megatron-rl convert roundtrip /models/qwen3-8b --check-logits --json roundtrip.json",
    "inspect": "example: megatron-rl convert inspect checkpoints/run-7 --json inspect.json",
}


def _command(commands, name: str, help: str) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=help, description=help, epilog=EXAMPLES[name])
    made.add_argument("source", type=_place, help="directory to read, or a URL, as s3://bucket/run")
    made.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write what was done or found there")
    if name != "inspect":
        made.add_argument("--dtype", choices=DTYPES, help="of the tensors written (default: as they are)")
        made.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def _add_degrees(made: argparse.ArgumentParser) -> None:
    for option, axis in (("--tp", "tensor"), ("--pp", "pipeline"), ("--ep", "expert")):
        help = f"cut as {axis}-parallel ranks of N would save it (default 1)"
        made.add_argument(option, type=int, default=1, metavar="N", help=help)


def _place(text: str) -> pathlib.Path | RemotePath:
    """Return the path or remote folder that an argument names; raise argparse's error for a URL that cannot be read."""
    if "://" not in text:
        return pathlib.Path(text)
    from megatron_rl.errors import ConfigError
    from megatron_rl.storage.location import location

    try:
        return location(text, "the argument")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _on_disk(text: str) -> pathlib.Path:
    """Return an argument as a path; raise argparse's error for a URL, since import writes only to a disk."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL, and import writes to a disk; name a folder, and copy it")
    return pathlib.Path(text)


def _add_conversions(commands) -> None:
    into = _command(
        commands, "import", "Hugging Face directory → Megatron checkpoint, or GGUF file → Hugging Face directory"
    )
    into.add_argument("target", type=_on_disk, help="Megatron-LM folder to write to, or directory (--gguf)")
    into.add_argument(
        "--gguf",
        action="store_true",
        help="SOURCE is a GGUF file, TARGET a Hugging Face directory (default float32)",
    )
    _add_degrees(into)
    into.add_argument(
        "--iteration", type=int, metavar="N", help="write iter_N, N above 0 (default: release, which starts at 0)"
    )
    out = _command(commands, "export", "Megatron checkpoint → Hugging Face directory")
    out.add_argument("target", type=_place, help="directory to write, or a URL, as s3://bucket/model")
    out.add_argument(
        "--hf", type=_place, help="directory or URL with the model's config and tokenizer (default: SOURCE/hf)"
    )
    out.add_argument("--iteration", type=int, metavar="N", help="which of the folder's (default: the latest)")
    out.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        metavar="X",
        help="size of a safetensors file, 10^9 bytes (default 5)",
    )
    for made in (into, out):
        made.add_argument("--overwrite", action="store_true", help="replace what is there")


def _add_checks(commands) -> None:
    back = _command(
        commands, "roundtrip", "Hugging Face → Megatron → Hugging Face, compared bit by bit; writes nothing that stays"
    )
    _add_degrees(back)
    back.add_argument(
        "--work",
        type=pathlib.Path,
        metavar="DIR",
        help="where temporary files go, twice the model's size (default: TMPDIR)",
    )
    back.add_argument(
        "--check-logits",
        action="store_true",
        help="compare log-probs on random tokens too, in float32, whole models in memory",
    )
    back.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X", help="largest difference of a log-prob (default 1e-4)"
    )
    look = _command(commands, "inspect", "say what a directory of either kind holds, and whether it can be converted")
    look.add_argument("--hf", type=_place, help="of a Megatron checkpoint: the model's config (default: SOURCE/hf)")
    look.add_argument("--iteration", type=int, metavar="N", help="which of the folder's (default: the latest)")
    look.add_argument("--tensors", action="store_true", help="list every tensor")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    _add_conversions(commands)
    _add_checks(commands)
    options = parser.parse_args(arguments)
    if options.command == "import" and options.iteration is not None and options.iteration < 1:
        parser.error(
            f"--iteration {options.iteration} must be above 0, or Megatron-LM refuses it; leave it out for release"
        )
    if options.command == "export" and not 0 < options.max_shard_gb < 1e9:
        parser.error(f"--max-shard-gb {options.max_shard_gb} must be above 0 and below 1e9")
    if (
        options.command == "import"
        and options.gguf
        and (options.tp, options.pp, options.ep, options.iteration) != (1, 1, 1, None)
    ):
        parser.error("--gguf writes a Hugging Face directory; leave --tp, --pp, --ep and --iteration out")
    if options.command == "import" and options.gguf and not isinstance(options.source, pathlib.Path):
        parser.error(f"--gguf reads a file of a disk, and {options.source} is a URL; copy it to one")
    return options


@contextlib.contextmanager
def progress_bar(what: str, total_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if it is a terminal; yield a function that advances it by a number of bytes.

    what: the word printed before the bar.
    quiet: True shows no bar; the function then does nothing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def dtype_of(options: argparse.Namespace):
    import torch

    return (
        None
        if options.dtype is None
        else {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[options.dtype]
    )


def gguf_command(options: argparse.Namespace) -> tuple[int, dict]:
    import torch

    from megatron_rl.commands.convert.gguf_file import GgufFile
    from megatron_rl.commands.convert.gguf_import import import_gguf

    file, dtype = GgufFile(options.source), dtype_of(options) or torch.float32
    started_s = time.monotonic()
    with progress_bar("import", file.num_elements * dtype.itemsize, quiet=options.quiet) as progress:
        report = import_gguf(file, options.target, dtype=dtype, overwrite=options.overwrite, progress=progress)
    report["seconds"] = time.monotonic() - started_s
    print(
        f"wrote {options.target}: {report['family']}, {report['tensors']} tensors, {report['bytes'] / 1e9:.2f} GB in "
        f"{report['seconds']:.1f} s"
    )
    print(f"  {', '.join(report['files'])}, from {', '.join(report['types'])}")
    return 0, report


def import_command(options: argparse.Namespace) -> tuple[int, dict]:
    if options.gguf:
        return gguf_command(options)
    from megatron_rl.checkpoint.convert import Cut, import_folder, import_size
    from megatron_rl.commands.convert.source import read_model
    from megatron_rl.weights.reader import HuggingFaceReader

    _, shape = read_model(options.source, vocab_multiple=options.tp)
    cut = Cut(tensor=options.tp, pipeline=options.pp, expert=options.ep)
    cut.check(shape)
    num_bytes = import_size(shape, HuggingFaceReader(options.source), dtype_of(options))
    started_s = time.monotonic()
    with progress_bar("import", num_bytes, quiet=options.quiet) as progress:
        path = import_folder(
            options.source,
            shape,
            options.target,
            cut=cut,
            dtype=dtype_of(options),
            iteration=options.iteration,
            overwrite=options.overwrite,
            progress=progress,
        )
    seconds = time.monotonic() - started_s
    print(f"wrote {path}: {shape.family}, {num_bytes / 1e9:.2f} GB of weights in {seconds:.1f} s")
    print(f"wrote {options.target / 'hf'}: config and tokenizer")
    return 0, {"wrote": str(path), "family": shape.family, "bytes": num_bytes, "seconds": seconds}


def export_command(options: argparse.Namespace) -> tuple[int, dict]:
    from megatron_rl.checkpoint.convert import export_folder, plan_export
    from megatron_rl.checkpoint.folder import MANIFEST, verify
    from megatron_rl.checkpoint.megatron_lm import open_folder
    from megatron_rl.checkpoint.torch_dist import TorchDistReader
    from megatron_rl.commands.convert.source import read_model, read_on_disk
    from megatron_rl.errors import ConfigError

    # Check the checkpoint and its model before anything is written.
    source = open_folder(options.source, options.iteration)
    hf = options.hf or source.hf
    if hf is None:
        raise ConfigError(
            f"{source.folder} has no hf/config.json; name a directory with the model's config and tokenizer by --hf"
        )
    hf = read_on_disk(hf, "--hf")
    _, shape = read_model(hf)
    if (source.path / MANIFEST).exists():  # a training run's checkpoint: its files' digests are verified first
        verify(source.path)
    # Plan the tensors, for the progress bar's total, then write them.
    planned = plan_export(TorchDistReader(source.path), shape, dtype_of(options))
    num_bytes = sum(tensor.num_bytes for tensor in planned)
    started_s = time.monotonic()
    with progress_bar("export", num_bytes, quiet=options.quiet) as progress:
        names = export_folder(
            source,
            shape,
            hf,
            options.target,
            dtype=dtype_of(options),
            shard_bytes=int(options.max_shard_gb * 1e9),
            overwrite=options.overwrite,
            progress=progress,
        )
    seconds = time.monotonic() - started_s
    print(
        f"wrote {options.target}: {shape.family} from {source.path}, {len(planned)} tensors, {num_bytes / 1e9:.2f} GB "
        f"in {seconds:.1f} s"
    )
    print(f"  {', '.join(names)}")
    return 0, {
        "wrote": str(options.target),
        "family": shape.family,
        "tensors": len(planned),
        "bytes": num_bytes,
        "files": names,
        "seconds": seconds,
    }


def roundtrip_command(options: argparse.Namespace) -> tuple[int, dict]:
    from megatron_rl.checkpoint.convert import Cut, export_folder, import_folder
    from megatron_rl.checkpoint.megatron_lm import open_folder
    from megatron_rl.checkpoint.roundtrip import check_logits, compare_folders
    from megatron_rl.commands.convert.source import read_model

    config, shape = read_model(options.source, vocab_multiple=options.tp)
    with tempfile.TemporaryDirectory(prefix="megatron-rl-convert.", dir=options.work) as work:
        megatron, back = pathlib.Path(work, "megatron"), pathlib.Path(work, "hf")
        cut = Cut(tensor=options.tp, pipeline=options.pp, expert=options.ep)
        import_folder(options.source, shape, megatron, cut=cut, dtype=dtype_of(options))
        imported = open_folder(megatron)
        export_folder(imported, shape, imported.hf, back)
        comparison = compare_folders(options.source, back, dtype_of(options), shape)
        print(
            "{equal} of {tensors} tensors and {equal_files} of {files} other files are equal, bit by bit".format(
                **comparison
            )
        )
        for name in comparison["different"]:
            print(f"  different: {name}")
        equal = not comparison["different"]
        if options.check_logits:
            comparison |= check_logits(options.source, imported, config)
            print(
                f"log-probs of {comparison['logprob_tokens']} random tokens: largest difference to transformers "
                f"{comparison['logprob_gap']:.2e}"
            )
            equal = equal and comparison["logprob_gap"] <= options.tolerance
    print("equal" if equal else "NOT equal")
    return 0 if equal else 1, {"family": shape.family, "equal_all": equal, **comparison}


def inspect_command(options: argparse.Namespace) -> tuple[int, dict]:
    from megatron_rl.commands.convert.inspection import inspect

    facts = inspect(options.source, options.hf, options.iteration)
    for name, value in facts.items():
        if name != "tensor_list" or options.tensors:
            shown = "".join(f"\n  {x}" for x in value) if isinstance(value, list) else f" {value}"
            print(f"{name.replace('_', ' ')}:{shown}")
    return 0 if facts["convertible"] == "yes" else 2, facts


def give_back_freed_memory() -> None:
    """Set glibc's threshold for mmap to 256 KiB, so that freed tensors go back to the operating system at once.

    By default glibc raises the threshold to the size of each freed tensor, and keeps freed memory.
    So a conversion with a layer of 31 MB and a tensor of 13 MB peaked at 84 MB. With the threshold
    set it peaked at 45 MB.
    """
    if platform.libc_ver()[0] == "glibc":
        m_mmap_threshold = -3  # malloc.h
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 18)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    import megatron_rl.distributed.platform  # noqa: F401  (before anything of Megatron-Core)
    from megatron_rl.checkpoint.folder import DamagedCheckpoint
    from megatron_rl.errors import CheckpointError, ConfigError, shortened
    from megatron_rl.hub.resolve import fetched_folder

    commands = {
        "import": import_command,
        "export": export_command,
        "roundtrip": roundtrip_command,
        "inspect": inspect_command,
    }
    from megatron_rl.commands.convert.bridge import bridge_command, needs_bridge

    try:
        if options.command == "roundtrip" or (options.command == "import" and not options.gguf):
            options.source = fetched_folder(options.source, "SOURCE")
        code, report = (bridge_command if needs_bridge(options) else commands[options.command])(options)
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
            print(f"wrote {options.json}")
    except DamagedCheckpoint as error:
        fault = f"{error}; copy the checkpoint again, or name another by --iteration"
    except (ConfigError, CheckpointError) as error:
        fault = str(error)
    except OSError as error:
        fault = f"{shortened(str(error), 400)}; mend that path, its permissions or its disk's space, and start again"
    else:
        return code
    print(f"error: {fault}", file=sys.stderr)
    return 2
