"""distributed/rendezvous.py: a port that is taken, mute or nobody's ends the start with its name."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from megatron_rl.distributed import rendezvous
from megatron_rl.distributed.rendezvous import meet
from megatron_rl.errors import PeerError

SHORT_S = 1.0  # a deadline that is met here


@pytest.fixture
def taken(monkeypatch) -> Iterator[int]:
    """Hold MASTER_PORT: connections are accepted, by the kernel, and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        yield port


def test_a_port_that_is_taken_is_named_by_the_rank_that_needs_it(taken, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PeerError, match=rf"rank 0 of 2 .* 127\.0\.0\.1:{taken} .*EADDRINUSE.*another MASTER_PORT"):
        meet(SHORT_S)


def test_a_mute_port_ends_the_wait(taken, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.1)
    with pytest.raises(
        PeerError, match=rf"rank 1 of 2 .* 127\.0\.0\.1:{taken} .*within 1 s .run.deadline_s.: .*does not answer"
    ):
        meet(SHORT_S)


def test_a_rank_that_never_comes_ends_the_wait(taken, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", str(free))
    with pytest.raises(PeerError, match=rf"rank 0 of 2 .* 127\.0\.0\.1:{free} .*1/2 clients joined.*did not start"):
        meet(SHORT_S)


def test_a_name_without_an_address_is_named(taken, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    with pytest.raises(PeerError, match=r"at no such host:\d+ .*; no such host has no address on this host: give it a"):
        meet(SHORT_S)


def test_a_launcher_that_names_no_port_is_named(taken, monkeypatch) -> None:
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(PeerError, match=r"at 127\.0\.0\.1:\? .*MASTER_PORT expected, but not set"):
        meet(SHORT_S)
