"""Whole runs through the command line on vLLM servers.

Weights go by both channels, and a server is killed while the run goes on.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator

import pytest
from safetensors.torch import load_file

from tests.runs.command import arguments, command_line, rows_of
from tests.vllm.served import GAP, KEY, START_S, VLLM, Served, wait_for

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def two_servers(arithmetic, tmp_path_factory) -> Iterator[Served]:
    served = Served(arithmetic / "model", tmp_path_factory.mktemp("servers"))
    try:
        yield served
    finally:
        served.end()


def given(served: Served, folder: pathlib.Path, run_dir: pathlib.Path, *extra: str) -> list[str]:
    servers = f"rollout.servers=[{','.join(served.urls)}]"
    bounds = (f"rollout.start_s={START_S}", "weight_sync.deadline_s=60")
    return arguments(folder, run_dir, *VLLM, servers, "rollout.api_key_env=KEY_OF_THE_TESTS", *bounds, *extra)


def train(rank: int, world: int, arguments: list[str]) -> tuple[int, str]:
    import os

    os.environ["KEY_OF_THE_TESTS"] = KEY
    return command_line(rank, world, arguments)


@pytest.mark.parametrize("channel", ["shared_memory", "broadcast"])
def test_a_run_on_two_servers_and_two_clients(pool, arithmetic, two_servers, tmp_path, channel):
    """A run of two clients on two servers: with DP=2 both ranks ask both servers, and rank 0 sends the weights."""
    extra = ("parallel.pipeline=1", f"weight_sync.channel={channel}", "run.deadline_s=300")
    results = pool.run(2, train, given(two_servers, arithmetic, tmp_path, *extra), timeout_s=280)
    assert [code for code, _ in results] == [0, 0], results
    first = [row for row in rows_of(tmp_path) if "train/logprob_gap_max" in row]
    assert len(first) >= 2 and max(row["train/logprob_gap_max"] for row in first) < GAP
    assert KEY not in (tmp_path / "config.yaml").read_text() and KEY not in "".join(said for _, said in results)


@pytest.mark.parametrize("channel", ["shared_memory", "broadcast"])
def test_a_server_killed_in_the_run_comes_back_with_the_current_weights(
    pool, arithmetic, two_servers, tmp_path, channel
):
    """A server killed in the run comes back with the current weights.

    kill -9 of an engine after the second rollout: the other goes on alone, the restarted one is sent weights and asked
    again.
    """
    extra = ("parallel.pipeline=1", "train.num_rollouts=90", "run.deadline_s=300", "optimizer.lr=1e-5")
    extra += (f"weight_sync.channel={channel}",)
    starts, killed = [], threading.Event()

    def kill() -> None:
        wait_for(
            "the second rollout", lambda: (tmp_path / "metrics.jsonl").exists() and len(rows_of(tmp_path)) > 4, START_S
        )
        starts.extend(two_servers.starts(1))
        two_servers.kill(1, "engine")
        killed.set()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    results = pool.run(2, train, given(two_servers, arithmetic, tmp_path, *extra), timeout_s=280)
    killer.join(5)
    assert killed.is_set() and [code for code, _ in results] == [0, 0], results
    rows = rows_of(tmp_path)
    assert max(row["rollout"] for row in rows) == 90
    assert max(row.get("train/logprob_gap_max", 0.0) for row in rows) < GAP
    assert len(two_servers.starts(1)) == len(starts) + 1
    said = "".join(text for _, text in results)
    assert (
        f"{two_servers.urls[1]} is left out until it serves again" in said
        and f"{two_servers.urls[1]} serves again" in said
    ), said
    after = two_servers.log_of(1).rpartition("Application startup complete")[2]
    assert after.count("POST /finish_weight_update") > 1 and after.count("POST /inference/v1/generate") > 1
    assert load_file(next(tmp_path.glob("checkpoints/*/hf/model.safetensors")))


def test_no_server_says_how_to_start_one(pool, arithmetic, tmp_path):
    nobody = ("rollout.servers=[http://127.0.0.1:9]", "rollout.start_s=3")
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *VLLM, *nobody), timeout_s=60)
    assert (
        code == 1 and "connection refused" in said and "python -m vllm.entrypoints.openai.api_server --model" in said
    ), said
