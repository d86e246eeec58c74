"""Real vLLM servers under the supervisor: answers against Hugging Face's, kills at work, and whole runs on them."""

import contextlib
import json
import os
import pathlib
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import TeacherConfig
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.rollout.engines.replica import Completion, GenerateRequest, ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm.dispatch import dispatch
from megatron_rl.rollout.vllm.http import Server
from megatron_rl.rollout.vllm.server_replica import ServerReplica
from megatron_rl.rollout.vllm.teacher import TeacherServers
from tests.pairwise import quick
from tests.patience import until
from tests.reference import make_samples, reference_logprobs
from tests.runs.command import command_line, rows_of
from tests.vllm.rig import logprobs_after
from tests.vllm.served import ANSWER_S, GAP, KEY, START_S, Served, kill, wait_for

pytestmark = pytest.mark.vllm

PROMPT = (5, 12, 6, 15)
VERSION = -1  # as the server says of the weights in its files
MAX_TOKENS, EOS = 512, 0
# Every one of these would change the samples if the server applied it.
GENERATION_CONFIG = {"eos_token_id": [EOS, 7], "temperature": 0.1, "top_k": 1, "top_p": 0.3, "repetition_penalty": 1.7}
GENERATION_CONFIG |= {"max_new_tokens": 3}


@pytest.fixture(scope="module")
def model_folder(inputs, tmp_path_factory) -> pathlib.Path:
    folder = pathlib.Path(shutil.copytree(inputs / "model", tmp_path_factory.mktemp("server") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_TOKENS}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return folder


@pytest.fixture(scope="module")
def served(model_folder, tmp_path_factory) -> Iterator[Served]:
    with Served(model_folder, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def connected(served) -> Iterator[list[ServerReplica]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_THE_TESTS", KEY)
        found = [ServerReplica(url, api_key_env="KEY_OF_THE_TESTS") for url in served.urls]
    for one in found:
        one.wait_ready(START_S)
        one.weight_version = VERSION  # weights are not what these tests are about: those of the folder will do
    yield found
    for one in found:
        one.close()


@pytest.fixture
def replicas(served, connected) -> list[ServerReplica]:
    """Return both servers with the weights of their files; where a run has replaced those, they are started anew."""
    if served.trained:
        for index, one in enumerate(connected):
            starts = len(served.starts(index))
            kill(served.log, index, "API")
            wait_for_restart(served, one, index, starts)
        served.trained = False
    return connected


@pytest.fixture
def replica(replicas) -> ServerReplica:
    return replicas[0]


@pytest.fixture(scope="module")
def reference(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


def ask(replica: ServerReplica, **changes) -> list[Completion]:
    return replica.submit(request_of(**changes)).result(ANSWER_S)


def request_of(**changes) -> GenerateRequest:
    given = {"request_id": "q", "token_ids": PROMPT, "n": 1, "max_tokens": 40, "temperature": 0.7, "seed": 17}
    return GenerateRequest(**(given | {"stop_token_ids": ()} | changes))


def same(left: Completion, right: Completion) -> bool:
    return left.token_ids.tolist() == right.token_ids.tolist()


def gap_of(model, sample: Completion, temperature: float) -> float:
    return np.abs(sample.logprobs - logprobs_after(model, PROMPT, sample.token_ids.tolist(), temperature)).max()


def test_facts(replica, model_folder):
    facts = replica.wait_ready(30.0)
    assert (facts.vocab_size, facts.max_model_tokens, facts.dtype) == (17, MAX_TOKENS, "float32")
    assert facts.logprobs_mode == "processed_logprobs" and facts.vllm_version
    assert replica.control("weights_received", {}, 30.0) == [
        {"version": -1, "checksum": "", "num_tensors": 0, "failure": ""}
    ]


def test_seeds_repeat_and_samples_count_up(replica):
    """Sample k of a request with seed s is the sample of a request with seed s + k, whatever runs beside it."""
    group = ask(replica, n=4)
    assert len({tuple(x.token_ids.tolist()) for x in group}) == 4
    futures = [replica.submit(request_of(request_id=f"beside{k}", seed=17 + k)) for k in range(4)]
    assert all(same(one, future.result(ANSWER_S)[0]) for one, future in zip(group, futures, strict=True))
    assert all(same(one, again) for one, again in zip(group, ask(replica, n=4), strict=True))
    assert not same(group[0], ask(replica, seed=99)[0])


def test_only_the_requests_stop_tokens_end_a_sample(replica):
    """The model's own end of sequence and generation_config's do not end it; the request's stop token is the last."""
    long = ask(replica, max_tokens=400)[0]
    assert len(long.token_ids) == 400 and long.finish_reason == "length" and {EOS, 7} <= set(long.token_ids.tolist())
    stop = int(long.token_ids[25])
    first = long.token_ids.tolist().index(stop)
    ended = ask(replica, max_tokens=400, stop_token_ids=(stop,))[0]
    assert ended.finish_reason == "stop" and ended.token_ids.tolist() == long.token_ids[: first + 1].tolist()
    assert len(ended.logprobs) == first + 1 and ended.weight_versions == ((-1, first + 1),)
    with_eos = ask(replica, max_tokens=400, stop_token_ids=(EOS,))[0]
    assert with_eos.finish_reason == "stop" and with_eos.token_ids[-1] == EOS and EOS not in with_eos.token_ids[:-1]


def test_logprobs_equal_hugging_faces_at_the_sampling_temperature(replica, reference):
    assert max(gap_of(reference, sample, 0.7) for sample in ask(replica, n=8, max_tokens=300)) < GAP


def test_greedy_equals_hugging_faces(replica, reference):
    ours = ask(replica, temperature=0.0, max_tokens=100)[0]
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(100):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert ours.token_ids.tolist() == tokens[len(PROMPT) :] and gap_of(reference, ours, 1.0) < GAP


@torch.no_grad()
def test_a_teachers_log_probs_of_given_tokens_are_hugging_faces(replicas, reference, served, monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEACHER", KEY)
    teacher = TeacherServers(TeacherConfig(servers=tuple(served.urls), api_key_env="KEY_OF_THE_TEACHER"))
    samples = make_samples(12, vocab_size=reference.config.vocab_size)
    wanted = [reference_logprobs(reference, sample)[0].numpy() for sample in samples]
    for one, two in zip(teacher.logprobs(samples, deadline_s=ANSWER_S), wanted, strict=True):
        assert one.dtype == np.float32 and np.abs(one - two).max() < GAP


def test_the_tokenizers_are_compared(replica, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    replica.check_tokenizer(lambda text: tokenizer.encode(text, add_special_tokens=False), ["3+4=", "12*5", ""])
    with pytest.raises(RequestRefused, match="another tokenizer than the trainer: '3\\+4='"):
        replica.check_tokenizer(lambda text: [1, 2], ["3+4="])


@pytest.mark.parametrize("changes, told", [
    ({"token_ids": (10**6,)}, "out of vocabulary"),
    ({"token_ids": (3,) * 600}, "longer than the maximum model length of 512"),
    ({"stop_token_ids": (10**6,)}, "out-of-vocab"),
    ({"n": 1000}, "max_num_seqs"),
])
def test_what_the_engine_refuses_is_refused(replica, changes, told):
    with pytest.raises(RequestRefused, match=f"400, .*{told}"):
        ask(replica, **changes)
    assert len(ask(replica)) == 1  # and it serves on


GUARDED = ("inference/v1/generate", "update_weights", "start_weight_update", "collective_rpc", "sleep", "tokenize")


def test_without_the_key_only_health_answers(served, replica):
    for key in (None, "another"):
        stranger = Server(served.urls[0], api_key=key, key_setting="rollout.api_key_env")
        stranger.call("GET", "/health", timeout_s=30.0)
        for route in GUARDED:
            with pytest.raises(RequestRefused, match="401"):
                stranger.call("POST", f"/{route}", {"method": "describe"}, timeout_s=30.0)
        with pytest.raises(RequestRefused, match="401"):
            stranger.call("GET", "/metrics", timeout_s=30.0)


def test_an_aborted_request_is_aborted_in_the_engine(served, replica):
    future = replica.submit(request_of(request_id="long", n=32, max_tokens=500))
    wait_for("the request's start", lambda: served.requests_running(0) > 0 or future.done())
    assert not future.done()
    replica.abort("long")
    with pytest.raises(ReplicaLost, match="given up"):
        future.result(ANSWER_S)
    wait_for("its end in the engine", lambda: served.requests_running(0) == 0)


REQUESTS = [request_of(request_id=f"q{k}", n=4, max_tokens=500, seed=1000 * k) for k in range(8)]


def spread(requests, replicas):
    return dispatch(requests, replicas, weight_version=VERSION, deadline_s=ANSWER_S, max_in_flight=8, attempts=2)


@contextlib.contextmanager
def killed_at_work(served: Served, index: int, victim: str) -> Iterator[None]:
    """Kill a server's process beside the body, as soon as the engine works on something; the work takes seconds."""

    def kill_at_work() -> None:
        wait_for("generation", lambda: served.requests_running(index) > 0)
        kill(served.log, index, victim)

    with ThreadPoolExecutor(1) as beside:
        killing = beside.submit(kill_at_work)
        yield
        killing.result()


def wait_for_restart(served: Served, replica: ServerReplica, index: int, starts: int) -> None:
    wait_for("the restart", lambda: len(served.starts(index)) > starts)
    replica.restart()
    replica.wait_ready(START_S)
    assert replica.weight_version == -1  # the files' weights: the trainer would send its own now
    replica.weight_version = VERSION


def assert_equal(quiet: dict, disturbed: dict) -> None:
    assert quiet.keys() == disturbed.keys()
    assert all(same(one, other) for name in quiet for one, other in zip(quiet[name], disturbed[name], strict=True))


@pytest.mark.long
def test_a_server_killed_at_work_is_replaced_by_the_other(served, replicas):
    """kill -9 of an engine in mid-generation: one call finishes everything, with the samples of a quiet run."""
    quiet, starts = spread(REQUESTS, replicas), len(served.starts(1))
    with killed_at_work(served, 1, "engine"):
        disturbed = spread(REQUESTS, replicas)
    assert list(disturbed.down) == [served.urls[1]] and not disturbed.lost and disturbed.causes, disturbed
    assert_equal(quiet.finished, disturbed.finished)
    wait_for_restart(served, replicas[1], 1, starts)
    assert_equal(quiet.finished, spread(REQUESTS, replicas).finished)


def test_the_only_server_killed_at_work_loses_and_doubles_nothing(served, replica):
    """kill -9 of the API in mid-generation; what was lost is asked again: the samples are those of a quiet run."""
    quiet, starts = spread(REQUESTS, [replica]), len(served.starts(0))
    with killed_at_work(served, 0, "API"):
        first = spread(REQUESTS, [replica])
    assert first.lost and list(first.down) == [served.urls[0]], (first.down, first.causes)
    wait_for_restart(served, replica, 0, starts)
    second = spread(first.lost, [replica])
    assert not second.lost and not set(first.finished) & set(second.finished)
    assert_equal(quiet.finished, {**first.finished, **second.finished})


@pytest.fixture(params=quick(["shared_memory", "broadcast"], "broadcast"))
def train(request, run, served) -> Callable[..., str]:
    """Return a call that runs two clients on two servers and returns what both said."""
    given = (f"rollout.servers=[{','.join(served.urls)}]", "rollout.api_key_env=KEY_OF_THE_TESTS")
    given += (f"rollout.start_s={START_S}", "weight_sync.deadline_s=60", f"run.deadline_s={START_S + 60}")
    given += (f"weight_sync.channel={request.param}",)
    served.trained = True

    def call(*settings: str, function=with_key, more=()) -> str:
        return "".join(said for (said,) in run(*given, *settings, world=2, function=function, more=more))

    return call


def with_key(rank: int, world: int, arguments: list[str]) -> tuple[int, str]:
    os.environ["KEY_OF_THE_TESTS"] = KEY
    return command_line(rank, world, arguments)


def test_a_run_on_two_servers_and_two_clients(train, tmp_path):
    """With DP=2 both ranks ask both servers, and rank 0 sends the weights."""
    said = train()
    first = [row for row in rows_of(tmp_path) if "train/logprob_gap_max" in row]
    assert len(first) >= 2 and max(row["train/logprob_gap_max"] for row in first) < GAP
    assert KEY not in (tmp_path / "config.yaml").read_text() and KEY not in said


def run_killing_an_engine(rank: int, world: int, arguments: list[str], url: str, log: pathlib.Path) -> tuple[int, str]:
    """Run the command line; after rollout 1 kill a server's engine, and after rollout 2 wait until it serves again."""
    write, seen = MetricsWriter.write, set()

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
        return False

    def write_and_act(self, row, *rest):
        if rank == 0 and row["rollout"] not in seen:
            seen.add(row["rollout"])
            if row["rollout"] == 1:
                kill(log, 1, "engine")
                assert until(lambda: not answers(), START_S)
            assert row["rollout"] != 2 or until(answers, START_S)
        return write(self, row, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_and_act)
        return with_key(rank, world, arguments)


@pytest.mark.long
def test_a_server_killed_in_the_run_comes_back_with_the_current_weights(train, served, tmp_path):
    """The other server goes on alone, the restarted one is sent weights and asked again."""
    starts, more = len(served.starts(1)), (served.urls[1], served.log)
    said = train("train.num_rollouts=6", "optimizer.lr=1e-5", function=run_killing_an_engine, more=more)
    rows = rows_of(tmp_path)
    assert max(row["rollout"] for row in rows) == 6
    assert max(row.get("train/logprob_gap_max", 0.0) for row in rows) < GAP and len(served.starts(1)) == starts + 1
    assert f"{served.urls[1]} is left out until it serves again" in said, said
    assert f"{served.urls[1]} serves again" in said, said
    after = served.log_of(1).rpartition("Application startup complete")[2]
    assert after.count("POST /finish_weight_update") > 1 and after.count("POST /inference/v1/generate") > 1
    assert load_file(next(tmp_path.glob("checkpoints/*/hf/model.safetensors")))


def test_no_server_says_how_to_start_one(run):
    ((said,),) = run("rollout.servers=[http://127.0.0.1:9]", "rollout.start_s=3", ends_with=1)
    assert "connection refused" in said and "python -m vllm.entrypoints.openai.api_server --model" in said, said
