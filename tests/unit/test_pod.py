"""A pod's place, the meeting of the pods, and the exit code that a job reads."""

import contextlib
import pathlib
import socket
import threading
import time

import pytest

from megatron_rl.cli import TRAINER, read_arguments
from megatron_rl.commands.pod.command import Pod, dry_run_line, main, torchrun_line, trainer_words
from megatron_rl.commands.pod.meeting import Left, meet
from megatron_rl.commands.pod.place import Place, place_of
from megatron_rl.errors import ConfigError, RunError
from tests.patience import HANG_S, patient

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INDEXED = {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "HEAD": "run-0.run", "PROCESSES": "8"}


def place(node: int, num_nodes: int, port: int, **given: object) -> Place:
    filled = dict(head="127.0.0.1", processes=1, address=None, meet_s=60, run_dir=None, save_every=10, exit_again=75)
    return Place(node=node, num_nodes=num_nodes, port=port, **(filled | given))


def free_port() -> int:
    """Return a port such that the next one was free as well."""
    for _ in range(100):
        with socket.create_server(("", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("", port + 1)).close()
            except OSError:
                continue
            return port
    raise AssertionError("no two successive ports are free")


def test_a_place_by_each_controllers_variables() -> None:
    """An Indexed Job's, both forms of Kubeflow's operator, and our own name before another's."""
    kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-master-0", "PET_MASTER_PORT": "23456",
                "PET_NPROC_PER_NODE": "8", "RANK": "1", "WORLD_SIZE": "16"}  # fmt: skip
    old = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "run-master-0", "MASTER_PORT": "23456", "PROCESSES": "8"}
    job = place_of(INDEXED)
    assert (job.node, job.num_nodes, job.head, job.port, job.meeting_port) == (1, 2, "run-0.run", 29400, 29401)
    for environment in (kubeflow, old):
        found = place_of(environment)
        assert (found.node, found.num_nodes, found.head, found.port) == (1, 2, "run-master-0", 23456)
        assert (found.processes, found.exit_again) == (8, 75)
    assert place_of(kubeflow | {"HEAD": "mine", "PORT": "5000"}).head == "mine"
    assert place_of(kubeflow | {"PET_NPROC_PER_NODE": "auto", "PROCESSES": "4"}).processes == 4
    assert place_of(kubeflow | {"PET_NPROC_PER_NODE": "auto"}).processes == place_of({}).processes
    assert (place_of({}).node, place_of({}).num_nodes) == (0, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=.2. is no whole number from 0 to 1"),
        ({"JOB_COMPLETION_INDEX": ""}, "none of JOB_COMPLETION_INDEX, PET_NODE_RANK, RANK is set, and the job has 2"),
        ({"HEAD": ""}, "pod 1 of 2, and nothing names pod 0; set HEAD"),
        ({"NNODES": "two"}, "NNODES=.two. is no whole number"),
        ({"PORT": "80"}, "PORT=.80. is no whole number from 1024"),
        ({"PROCESSES": "-1"}, "PROCESSES=.-1. is no whole number"),
        ({"EXIT_AGAIN": "2"}, "EXIT_AGAIN=.2. is no whole number from 3"),
    ],
)
def test_a_variable_that_cannot_be_is_named(change: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        place_of(INDEXED | change)


def test_a_mistake_ends_a_pod_with_2_before_it_meets_anyone(monkeypatch, capsys) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for words, own, told in (
        (["optimizer.lr=fast"], INDEXED, "optimizer.lr"),
        ([], INDEXED | {"NNODES": "0"}, "NNODES"),
        (["--config", "nowhere.yaml"], INDEXED, "nowhere.yaml"),
    ):
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        assert main(words) == 2 and told in capsys.readouterr().err


def test_the_commands_of_a_pod() -> None:
    found = place_of(INDEXED | {"POD_IP": "10.0.0.2", "RUN_DIR": "/runs/a", "SAVE_EVERY": "5"})
    words = trainer_words(found, ["--config", "a.yaml"])
    assert words == ["--run-dir", "/runs/a", "checkpoint.save_every_rollouts=5", "--config", "a.yaml"]
    line = " ".join(torchrun_line(found, "10.0.0.1", words)[1:])
    assert line.startswith(
        "-m megatron_rl.commands.ranks --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 "
        "--master-port 29400 --local-addr 10.0.0.2 -m megatron_rl.train --run-dir /runs/a"
    )
    assert "--standalone --local-addr 127.0.0.1" in " ".join(torchrun_line(place_of({}), "", words))
    assert dry_run_line(found, words)[1:7] == ["-m", "megatron_rl.train", "--nodes", "2", "--gpus-per-node", "8"]


class Meeting:
    """Holds a meeting of threads; each thread's end is an address, or its error."""

    def __init__(self, num_nodes: int, **given: object) -> None:
        self.port, self.num_nodes, self.given = free_port(), num_nodes, given
        self.ends: dict[int, object] = {}
        self.said: list[str] = []
        self.told: set[int] = set()
        self._threads: list[threading.Thread] = []

    def come(self, node: int) -> threading.Thread:
        def run() -> None:
            try:
                where = place(node, self.num_nodes, self.port, **self.given)
                self.ends[node] = meet(where, lambda: node in self.told, self.said.append)
            except (RunError, Left) as error:
                self.ends[node] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return self._threads[-1]

    def end(self) -> dict[int, object]:
        for thread in self._threads:
            thread.join(patient(HANG_S))
            assert not thread.is_alive(), self.said
        return self.ends

    def connection(self, line: bytes) -> socket.socket:
        """Connect to the head as soon as it listens, and say a line."""
        deadline = time.monotonic() + patient(HANG_S)
        while True:
            try:
                found = socket.create_connection(("127.0.0.1", self.port + 1), timeout=patient(HANG_S))
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
                continue
            found.sendall(line)
            return found


def test_pods_start_together_whoever_comes_first() -> None:
    """Also with the head last, which no other pod has found until then."""
    meeting = Meeting(3)
    meeting.come(2)
    meeting.come(1)
    meeting.come(0)
    assert meeting.end() == {0: "127.0.0.1", 1: "127.0.0.1", 2: "127.0.0.1"}


def test_a_pod_that_left_is_forgotten_and_its_successor_counts() -> None:
    """Nobody starts by a connection that is closed; of two of one number the later one is told to start."""
    meeting = Meeting(3)
    meeting.come(0)
    meeting.connection(b"pod 1 of 3\n").close()
    with meeting.connection(b"pod 1 of 2\n") as other_job, meeting.connection(b"GET / HTTP/1.1\r\n" * 9) as stranger:
        assert other_job.recv(9) == b""
        with contextlib.suppress(ConnectionResetError):  # closed with words unread
            assert stranger.recv(9) == b""
    with meeting.connection(b"pod 2 of 3\n") as waiting:
        meeting.come(1)
        assert waiting.recv(9) == b"start\n"
    assert meeting.end() == {0: "127.0.0.1", 1: "127.0.0.1"}

    meeting = Meeting(3)
    meeting.come(0)
    with meeting.connection(b"pod 1 of 3\n") as replaced, meeting.connection(b"pod 1 of 3\n") as successor:
        assert replaced.recv(9) == b""
        meeting.come(2)
        assert successor.recv(9) == b"start\n"
    meeting.end()


def test_a_meeting_that_fails_says_who_is_missing() -> None:
    meeting, nameless = Meeting(4, meet_s=1), Meeting(2, meet_s=1, head="no-such-host.invalid")
    meeting.come(0)
    nameless.come(1)
    with meeting.connection(b"pod 2 of 4\n") as present:
        ends = meeting.end()
        assert present.recv(9) == b""
    assert "waited 1 s (MEET_S) for pods 1, 3 of 4" in str(ends[0])
    told = str(nameless.end()[1])
    assert "did not meet pod 0 at no-such-host.invalid" in told and "publishNotReadyAddresses" in told
    assert len(nameless.said) == 1


def test_a_pod_that_is_told_to_leave_does_not_wait() -> None:
    meeting = Meeting(3, meet_s=600)
    meeting.come(0)
    meeting.come(1)
    meeting.told |= {0, 1}
    assert [type(end) for end in meeting.end().values()] == [Left, Left]


def test_the_exit_code_by_what_was_saved(tmp_path: pathlib.Path, capsys) -> None:
    """A failure past a checkpoint is no failure of the job's; one that saved nothing new keeps its code."""

    def attempt(*, exit_again: int = 75) -> Pod:
        where = place(0, 1, 29400, run_dir=str(tmp_path), exit_again=exit_again)
        return Pod(where, read_arguments(trainer_words(where, []), TRAINER)[0])

    def save(name: str) -> None:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    first = attempt()
    assert [first._exit_code(code) for code in (0, 1, 2, 75, 137)] == [0, 1, 2, 75, 137]
    save("supervised/iter_0000005")
    assert first._exit_code(1) == 75
    second = attempt(exit_again=143)
    save("iter_0000003.partial")  # being written by another rank, or left by a kill
    assert [second._exit_code(code) for code in (0, 1, 2, 75, 137)] == [0, 1, 2, 143, 137]
    save("iter_0000000")
    assert second._exit_code(1) == 143
    assert "the ranks failed with 1, past where they began: checkpoint: 0: 143" in capsys.readouterr().err
