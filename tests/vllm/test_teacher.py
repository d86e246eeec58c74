"""A teacher behind a real vLLM server: its log-probs of given tokens are Hugging Face's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_rl.config import TeacherConfig
from tests.reference import make_samples, reference_logprobs
from tests.vllm.served import GAP, KEY, START_S, Served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from megatron_rl.rollout.vllm.server_replica import ServerReplica
from megatron_rl.rollout.vllm.teacher import TeacherServers

pytestmark = pytest.mark.vllm
KEY_VARIABLE = "KEY_OF_THE_TEACHER"


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(KEY_VARIABLE, KEY)
        yield


@pytest.fixture(scope="module")
def served(inputs, tmp_path_factory) -> Iterator[Served]:
    running = Served(inputs / "model", tmp_path_factory.mktemp("teacher"), replicas=1)
    try:
        ServerReplica(running.urls[0], api_key_env=KEY_VARIABLE).wait_ready(START_S)
        yield running
    finally:
        running.end()


def test_log_probs_of_given_tokens_are_hugging_faces(bounded, inputs, served) -> None:
    from transformers import AutoModelForCausalLM

    teacher = TeacherServers(TeacherConfig(servers=(served.urls[0],), api_key_env=KEY_VARIABLE))
    model = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
    samples = make_samples(12, vocab_size=model.config.vocab_size)
    found = teacher.logprobs(samples, deadline_s=60.0)
    with torch.no_grad():
        wanted = [reference_logprobs(model, sample)[0].numpy() for sample in samples]
    for one, two in zip(found, wanted, strict=True):
        assert one.dtype == np.float32 and np.abs(one - two).max() < GAP
