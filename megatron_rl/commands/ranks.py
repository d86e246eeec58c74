"""The start of ranks by torchrun's own code, without torchrun's report of a failure; ``--nproc`` uses it.

    python -m megatron_rl.commands.ranks --nproc-per-node 2 -m megatron_rl.train ...      # torchrun's arguments

torchrun ends with a traceback and a report, some 40 lines below the message of the failed rank.
Here that message comes last. If no rank printed a reason, because a signal ended it, one line names
the rank and the signal.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.cli import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SAID_BY_RANKS = (EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_PREEMPTED)  # exit codes with which a rank prints the reason
# The first words of torchrun's log lines (2.6 to 2.13) about ends that are printed here, or by a rank.
LOGGED_OF_ENDS = (
    *("failed (exitcode", "no error file defined", "Sending process", "Closing process", "Received %s death signal"),
    *("Got termination signal", "Error waiting on exit barrier"),
)


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments``; return 0 if every rank ended well, else the exit code of a failed rank.

    That rank is the first one that a signal ended, or else the first one that failed. The code is
    128 + N for signal N.
    """
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT, ranks_run=False)
    _log_in_lines()
    try:
        torchrun.main(list(arguments))
    except ChildFailedError as error:
        return explain(error)
    except SignalException as error:
        return _ended_by(error.sigval, ranks_run=True)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT, ranks_run=False)
    return 0


def _ended_by(number: signal.Signals, *, ranks_run: bool) -> int:
    """Print which signal ended the job; return 128 + the signal's number.

    number: the signal. Nothing is printed for SIGINT (Ctrl-C) if ranks ran, since a rank reports it.
    ranks_run: whether ranks were already running.
    """
    if not (ranks_run and number == signal.SIGINT):
        told = "; the ranks were told, and have ended" if ranks_run else ", before any rank ran"
        print(f"megatron_rl: ended by {number.name}{told}", file=sys.stderr)
    return 128 + number


def explain(error: ChildFailedError) -> int:
    """Print which rank failed first, unless that rank has printed the reason itself; return its exit code.

    A rank that a signal ended counts as first even if others were seen to fail earlier: a lost rank
    makes the others fail. SIGTERM does not count, since torchrun sends it to the remaining ranks.
    """
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    killed = [(rank, each) for rank, each in failures if each.exitcode < 0 and each.exitcode != -signal.SIGTERM]
    rank, failure = (killed or failures)[0]
    who, code = f"rank {rank} (process {failure.pid})", failure.exitcode
    if code < 0:
        name = signal.Signals(-code).name
        often = ", as the kernel does where the host's memory is full" if -code == signal.SIGKILL else ""
        print(f"megatron_rl: {who} was ended by {name}{often}; the others were ended after it", file=sys.stderr)
        return 128 - code
    if code not in SAID_BY_RANKS:
        reason = " (its error stands above)" if code == EXIT_FAILED else ""
        print(
            f"megatron_rl: {who} ended with exit code {code}{reason}; the others were ended after it", file=sys.stderr
        )
    return code


def _log_in_lines() -> None:
    """Log torchrun's messages as single lines with our prefix, and drop its messages about ended ranks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("megatron_rl: torchrun: %(message)s"))
    handler.addFilter(lambda record: not str(record.msg).startswith(LOGGED_OF_ENDS))
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(handler)
    logger.propagate = False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
