"""The command line of a training run or a server: it reads arguments, sets up logging and returns exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import logging
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron_rl import hub
from megatron_rl.config import Config, load_config
from megatron_rl.distributed.agreement import announce
from megatron_rl.distributed.child_process import end_with_launcher
from megatron_rl.distributed.time_limit import time_limit
from megatron_rl.errors import ConfigError, RunError, quoted, shortened
from megatron_rl.users_code import exit_is_an_error
from megatron_rl.validate import validate_config

EXIT_CONFIG, EXIT_FAILED = 2, 1
EXIT_PREEMPTED = 75  # sysexits' EX_TEMPFAIL: everything is saved; start the same command again
EXIT_INTERRUPTED = 130  # the code that shells give to a command ended by Ctrl-C
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ESTALE)
_interrupted: list[int] = []  # the SIGINT that ends this process, once it has arrived


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Describes a program that reads a configuration from its command line.

    name, description, example: texts for ``--help``.
    checks: whether ``main`` offers ``--dry-run``, and checks the configuration before it calls
        ``train``. If False, ``train`` checks the configuration itself.
    """

    name: str
    description: str
    example: str
    checks: bool


TRAINER = Program(
    name="python -m megatron_rl.train",
    description="Train a policy with the zero-advantage skip inside Megatron's schedule.",
    example="torchrun --nproc_per_node 2 -m megatron_rl.train --config examples/gsm8k/gsm8k.yaml "
    "train.num_rollouts=100",
    checks=True,
)
SERVER = Program(
    name="python -m megatron_rl.serve",
    description="Serve Tinker's API: other people's training loops on this backend.",
    example="torchrun --nproc_per_node 2 -m megatron_rl.serve --config examples/tinker/server.yaml",
    checks=False,
)


def main(train: Callable[[Config], bool], arguments: Sequence[str] | None = None, *, program: Program = TRAINER) -> int:
    """Read the configuration, check it, call ``train`` with it, and return the exit code.

    The exit code is 0 if the run came to its end, and EXIT_PREEMPTED if it was preempted. It is
    EXIT_CONFIG if the configuration cannot work, EXIT_INTERRUPTED after Ctrl-C, and EXIT_FAILED after
    any other error. The reason of a failure goes to stderr.

    train: a function that is called with the configuration. It returns True if the run came to its
        end, and False if the run was preempted and has saved everything.
    arguments: the command line's arguments; None takes this process's (``sys.argv``).
    """
    # Configuration, imports, then the dry run or the run; every expected error becomes an exit code.
    is_main = os.environ.get("RANK", "0") == "0"
    set_up_logging(is_main)
    try:
        config, options = read_arguments(arguments, program)
        config = hub.fetched(config, weights=not options.dry_run, pins=not options.dry_run)
        with time_limit("the check of the configuration", config.run.deadline_s):  # it calls a user's own functions
            if program.checks:
                validate_config(config)
        if not _stages_import(is_main):
            return EXIT_FAILED
        if options.dry_run:
            if is_main:
                from megatron_rl.trainer.dry_run import dry_run

                dry_run(config, options)
            return 0
        return 0 if _ended(lambda: train(config)) else EXIT_PREEMPTED
    except (ConfigError, FileNotFoundError) as error:
        announce(str(error))
        return EXIT_CONFIG
    except RunError as error:
        if _interrupted:
            return _end_of_interrupted(is_main)
        print(f"megatron_rl: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return _end_of_interrupted(is_main)
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        print(f"megatron_rl: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _ended(train: Callable[[], bool]) -> bool:
    """Call ``train`` and return its result, True if the run came to its end.

    Raises RunError if code within ``train`` raises SystemExit, whatever the exit code. Raises
    PeerError if ``train`` fails because another rank has ended.
    """
    from megatron_rl.distributed.lost_rank import losses_named  # torch is imported by now

    try:
        with exit_is_an_error(), losses_named():
            return train()
    except SystemExit as error:
        raise RunError(
            f"something within the run asked to exit ({error.code!r}), which is a failure; mend what calls it:\n"
            f"{traceback.format_exc()}"
        ) from error


def end_process(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and end the process with the exit code that it returns.

    After an unexpected exception the traceback is printed, and the exit code is EXIT_FAILED, or
    EXIT_INTERRUPTED if Ctrl-C was pressed.
    """
    end_with_launcher()
    signal.signal(signal.SIGINT, _interrupt)
    try:
        code = main()
    except Exception:  # noqa: BLE001 (printed whole, and the process ends)
        if _interrupted:
            code = _end_of_interrupted(os.environ.get("RANK", "0") == "0")
        else:
            traceback.print_exc()
            code = EXIT_FAILED
    leave(code)


def _interrupt(number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt at the first SIGINT (Ctrl-C), and ignore later ones, which would disturb the run's end.

    A run that saves checkpoints replaces this handler of SIGINT by another.
    """
    if not _interrupted:
        _interrupted.append(number)
        raise KeyboardInterrupt


def _end_of_interrupted(is_main: bool) -> int:
    """Return EXIT_INTERRUPTED, after the main rank has printed that Ctrl-C ended the job.

    No other error is printed: errors after Ctrl-C follow from ranks that have already left.
    """
    if is_main:
        print(
            "megatron_rl: ended by Ctrl-C (SIGINT); no checkpoint is saved then, unless checkpoint.save_every_rollouts "
            "is set",
            file=sys.stderr,
        )
    return EXIT_INTERRUPTED


def leave(code: int) -> NoReturn:
    """End the process with exit code ``code`` at once, without closing process groups or finalizing the interpreter.

    After a failure the run's process groups are still open, and closing them could wait for a lost
    rank. During a normal interpreter exit gloo's threads may abort the process, which would replace
    the exit code.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def read_arguments(arguments: Sequence[str] | None, program: Program) -> tuple[Config, argparse.Namespace]:
    """Return (configuration, options) of a command line: the merged Config, and argparse's other options.

    arguments: the words of the command line; None: ``sys.argv``.

    Raises ConfigError for an unknown option or setting. Raises ConfigError also for options of the
    forecast of times and memory (docs/simulate-cluster.md) without ``--dry-run``.
    """
    # The options; then the configuration from file and overrides.
    parser = argparse.ArgumentParser(
        prog=program.name, description=program.description, epilog=f"example: {program.example}"
    )
    parser.add_argument("--config", help="YAML file; everything it leaves out has a default")
    parser.add_argument("--run-dir", help="folder of the run instead of runs/<run.name>")
    if program.checks:
        parser.add_argument(
            "--dry-run", action="store_true", help="print what the job would take, join no world, and end"
        )
    forecast = _add_forecast(parser) if program.checks and _has_other_options(arguments) else {}
    parser.set_defaults(dry_run=False)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    for name in unknown:
        if "=" not in name:
            raise _no_option(name, [option for action in parser._actions for option in action.option_strings])
    if not options.dry_run:
        _refuse_forecast(options, forecast)
    config = load_config(options.config, [*unknown, *options.overrides])  # it explains a wrong --section.key=value
    if options.run_dir:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=options.run_dir))
    return config, options


def _no_option(name: str, known: Sequence[str]) -> ConfigError:
    from megatron_rl.config.nearest import advice, name_elsewhere

    bare = name.lstrip("-")
    meant = f", and {advice(Config, Config, bare)}" if name_elsewhere(bare) else ""
    options = ", ".join(known)
    return ConfigError(f"{quoted(name)} is no option; those are {options}; a setting is section.key=value{meant}")


def _has_other_options(arguments: Sequence[str] | None) -> bool:
    """Return whether a command line has any option but --config and --run-dir, such as --dry-run.

    arguments: the words of the command line; None: ``sys.argv``.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return any(word.startswith("-") and word.partition("=")[0] not in ("--config", "--run-dir") for word in words)


def _add_forecast(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Add the options of ``--dry-run`` that forecast times and memory; return {option name: argparse's action}."""
    from megatron_rl.simulator.arguments import add_arguments

    group = parser.add_argument_group("with --dry-run (docs/simulate-cluster.md)")
    add_arguments(group)
    return {action.option_strings[0]: action for action in group._group_actions}


def _refuse_forecast(options: argparse.Namespace, known: dict[str, argparse.Action]) -> None:
    """Raise ConfigError if the command line has options of the forecast, which need ``--dry-run``.

    If these options state a number of GPUs, the message gives the command that starts a job of that
    size.

    known: the options of the forecast, as ``_add_forecast`` returns them.
    """
    values = {name: vars(options)[action.dest] for name, action in known.items()}
    stated = {name: value for name, value in values.items() if value != known[name].default}
    if not stated:
        return
    said = shortened(" ".join(f"{name} {value}" for name, value in stated.items()), 200)
    if not {"--nodes", "--gpus-per-node"} & set(stated):
        raise ConfigError(f"{said}: arguments of a forecast, and nothing is forecast; add --dry-run, or leave them out")
    nodes, on_node = stated.get("--nodes", 1), stated.get("--gpus-per-node", 8)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    meet = "--standalone --local-addr 127.0.0.1" if nodes == 1 else several
    where = "" if nodes == 1 else f" on each of the {nodes} nodes, HOST being one of them (docs/slurm.md)"
    named = {"--config": options.config, "--run-dir": options.run_dir}
    words = [*(word for option, value in named.items() if value for word in (option, value)), *options.overrides]
    raise ConfigError(
        f"{said}: a job of so many GPUs is forecast by --dry-run, and started by a launcher{where}: torchrun {meet} "
        f"--nproc-per-node {on_node} -m megatron_rl.train {shlex.join(words)}".rstrip()
    )


def _stages_import(is_main: bool) -> bool:
    """Import Megatron-Core and all modules that need it, and return whether that worked.

    On failure the main rank prints the error and how to mend the installation.
    """
    try:
        import megatron_rl.trainer.build  # noqa: F401
    except (ImportError, OSError, AttributeError) as error:  # the last two: missing libraries, half-installed packages
        if is_main:
            from megatron_rl.doctor import explain_import_error

            print(explain_import_error(error), file=sys.stderr)
        return False
    return True


def set_up_logging(is_main: bool) -> None:
    """Make logging write to stderr: from level INFO on the main rank, and only errors on other ranks.

    Third-party libraries log only errors on every rank.
    """
    logging.basicConfig(
        level=logging.INFO if is_main else logging.ERROR, format="%(message)s", handlers=[_StderrHandler()]
    )
    for name in ("megatron.core", "transformers", "httpx", "httpx2", "aiobotocore", "botocore", "s3fs"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*")  # about fallbacks, which the run's log names


class _StderrHandler(logging.Handler):
    """Writes each log record to the stream that ``sys.stderr`` is at that moment.

    While the progress bar is shown, rich replaces sys.stderr by a stream that prints above the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
