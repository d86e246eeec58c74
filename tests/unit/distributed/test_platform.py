"""The device that a process takes: never the CPU in silence on a host whose GPU does not work."""

from __future__ import annotations

import pytest

from megatron_rl.distributed.platform import choose_device
from megatron_rl.errors import ConfigError

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)"


def choose(environment: dict[str, str], *, driver: bool, works: bool) -> str:
    return choose_device(environment, driver_loaded=driver, is_available=lambda: works, reason=lambda: TOO_OLD)


@pytest.mark.parametrize(
    ("environment", "driver", "works", "device"),
    [
        ({}, True, True, "cuda"),
        ({}, False, False, "cpu"),
        ({"MEGATRON_RL_DEVICE": "cuda"}, True, True, "cuda"),
        ({"MEGATRON_RL_DEVICE": "cpu"}, True, True, "cpu"),
        ({"MEGATRON_RL_DEVICE": "CPU"}, True, False, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, False, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, True, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, True, True, "cuda"),
    ],
)
def test_the_device_is_the_one_that_works_or_was_asked_for(environment, driver, works, device):
    assert choose(environment, driver=driver, works=works) == device


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"MEGATRON_RL_DEVICE": "cuda"}])
def test_a_gpu_host_on_which_cuda_does_not_work_is_an_error_with_torchs_reason(environment):
    with pytest.raises(ConfigError) as error:
        choose(environment, driver=True, works=False)
    assert TOO_OLD in str(error.value) and "MEGATRON_RL_DEVICE=cpu" in str(error.value)


def test_cuda_that_was_asked_for_and_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="MEGATRON_RL_DEVICE=cuda, and CUDA does not work here.*too old"):
        choose({"MEGATRON_RL_DEVICE": "cuda"}, driver=False, works=False)


def test_an_unknown_device_is_an_error_that_names_the_choices():
    with pytest.raises(ConfigError, match="MEGATRON_RL_DEVICE='tpu' is no device; set it to cpu or cuda"):
        choose({"MEGATRON_RL_DEVICE": "tpu"}, driver=False, works=False)
