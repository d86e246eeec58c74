"""The fixtures of several files of this room."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from transformers import Qwen2ForCausalLM

from megatron_rl.rollout.weight_sync.sender import WeightSender
from tests.patience import until
from tests.unit.rollout.receiving_engine import sender_of
from tests.unit.rollout.tiny_model import _model


@pytest.fixture
def alone() -> Iterator[None]:
    """Make a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model() -> Qwen2ForCausalLM:
    """Make the tiny model, which no test changes."""
    return _model()


@pytest.fixture(scope="session")
def hf_path(model: Qwen2ForCausalLM, tmp_path_factory) -> str:
    """Make the folder with its config.json, which no test changes."""
    path = tmp_path_factory.mktemp("model")
    model.config.save_pretrained(path)
    return str(path)


@pytest.fixture
def senders() -> Iterator[Callable[..., WeightSender]]:
    """Return a function that makes a sender, which ends with the test."""
    with contextlib.ExitStack() as made:

        def sender(**settings) -> WeightSender:
            found = sender_of(**settings)
            made.callback(found.free)
            made.callback(found.group.close)
            return found

        yield sender


@pytest.fixture
def sync(senders, request) -> WeightSender:
    """Make a sender with the settings of the module's ``SENDER``."""
    return senders(**request.module.SENDER)


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    threads = threading.active_count()
    yield
    # a request's thread ends with its connection
    assert until(lambda: threading.active_count() <= threads), threading.enumerate()
