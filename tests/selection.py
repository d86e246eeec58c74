"""Chooses a sixth of the long tests, or the tests of a list, and writes how each test ended, for .ci/run.

    make test-long PYTEST_ARGS="-p tests.selection --long-tests 3/6"        # the third sixth of the tests marked long
    make test-vllm PYTEST_ARGS="-p tests.selection --long-tests none"       # the short form: all that is not long
    make test PYTEST_ARGS="-p tests.selection --outcomes-to ended.txt"
    make test PYTEST_ARGS="-p tests.selection --only-from ended.txt -n 0"   # those that failed there, alone

A test's sixth is a digest of its name: it stays where it is when others come and go, and six sixths are the whole.
"""

import pathlib
import zlib

import pytest


def share_of(test: str, shares: int) -> int:
    """Return the share, 1 to ``shares``, that holds the test of this name."""
    return zlib.crc32(test.encode()) % shares + 1


def chosen_share(text: str) -> tuple[int, int]:
    """Read ``none`` as (0, 1), and ``K/N`` as (K, N).

    Raises pytest.UsageError where the text is neither, or K is not one of 1 to N.
    """
    if text == "none":
        return 0, 1
    share, _, shares = text.partition("/")
    if not (share.isdecimal() and shares.isdecimal() and 1 <= int(share) <= int(shares)):
        raise pytest.UsageError(f"--long-tests {text!r} must be none or a share such as 3/6")
    return int(share), int(shares)


def failed_tests(outcomes: pathlib.Path) -> list[str]:
    """Return the names of the tests, or of the files that could not be read, that failed there; each once."""
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    return list(dict.fromkeys(line.removeprefix("failed ") for line in lines if line.startswith("failed ")))


class Outcomes:
    """Writes a line ``passed NAME`` or ``failed NAME`` for each test, as it ends, and ``ended CODE`` last.

    A test that fails in its setup or after its end, a lane that dies under it and a file that cannot be read count as
    failed. Where pytest itself broke off, its code is neither 0 nor 1, or the last line is missing.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._file = open(path, "a")  # noqa: SIM115

    def _write(self, outcome: str, name: str) -> None:
        self._file.write(f"{outcome} {name}\n")
        self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call":
            self._write(report.outcome, report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write("ended", str(int(exitstatus)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-tests", metavar="none|K/N", help="which of the tests marked long to keep; all by default")
    parser.addoption("--outcomes-to", type=pathlib.Path, metavar="FILE", help="append how each test ended")
    parser.addoption("--only-from", type=pathlib.Path, metavar="FILE", help="keep only the tests that failed there")


def pytest_configure(config: pytest.Config) -> None:
    is_lane = hasattr(config, "workerinput")
    if (path := config.getoption("--outcomes-to")) and not is_lane:
        config.pluginmanager.register(Outcomes(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what the options leave out."""
    kept = list(items)
    if text := config.getoption("--long-tests"):
        share, shares = chosen_share(text)
        kept = [x for x in kept if not x.get_closest_marker("long") or share_of(x.nodeid, shares) == share]
    if path := config.getoption("--only-from"):
        names = set(failed_tests(path))
        kept = [x for x in kept if x.nodeid in names or x.nodeid.partition("::")[0] in names]
    left_out = set(items) - set(kept)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = kept
