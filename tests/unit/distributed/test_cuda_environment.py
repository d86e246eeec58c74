"""The variables that a run adds before CUDA starts, and those of the user that it leaves or refuses."""

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.distributed import cuda_environment
from megatron_rl.distributed.cuda_environment import DETERMINISTIC, prepare_cuda, set_variables, wanted_variables
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.vllm.process_replica import engine_environment

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True",)}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": ("1",)}


@pytest.fixture(autouse=True)
def nothing_added(monkeypatch):
    monkeypatch.setattr(cuda_environment, "_added", {})


def test_a_run_wants_what_its_settings_need():
    for overrides, wanted in (
        ([], EXPANDABLE),
        (["parallel.tensor=2"], ONE_QUEUE | EXPANDABLE),
        (["parallel.context=2"], ONE_QUEUE | EXPANDABLE),
        (["weight_sync.channel=cuda_ipc"], {}),
        (["rollout.engine=vllm"], {}),  # auto opens the trainer's memory
        (["rollout.engine=vllm", "weight_sync.channel=shared_memory"], EXPANDABLE),
        (["rollout.engine=vllm", "rollout.servers=[http://127.0.0.1:8000]"], EXPANDABLE),
        (["megatron.ddp.nccl_ub=true"], {}),
        (["run.deterministic=true"], EXPANDABLE | DETERMINISTIC),
    ):
        config = load_config(None, overrides)
        sections = config.run, config.parallel, config.megatron, config.rollout, config.weight_sync
        assert wanted_variables(*sections) == wanted


def test_a_users_variable_stays_and_what_is_added_is_known_and_reaches_no_engine():
    environment = {"PYTORCH_ALLOC_CONF": "backend:native", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    given = dict(environment)
    set_variables(ONE_QUEUE | EXPANDABLE, environment, has_started=False)
    assert environment == given and not cuda_environment.added_variables()
    environment = {"HOME": "/home/x", "NCCL_ALGO": "Ring"}
    set_variables(ONE_QUEUE | EXPANDABLE | DETERMINISTIC, environment, has_started=False)
    wanted = ONE_QUEUE | EXPANDABLE | DETERMINISTIC
    added = {name: values[0] for name, values in wanted.items() if name != "NCCL_ALGO"}
    assert environment == {"HOME": "/home/x", "NCCL_ALGO": "Ring", **added}
    assert cuda_environment.added_variables() == added
    inherited = engine_environment(environment, ["0"], None)
    assert not added.keys() & inherited.keys() and inherited["NCCL_ALGO"] == "Ring"
    set_variables(wanted, environment, has_started=True)  # a second model of the run


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_variable_that_breaks_repetition_is_refused(name):
    with pytest.raises(ConfigError, match=f"run.deterministic=true needs {name} to be one of .* it is 'other'; unset"):
        set_variables(DETERMINISTIC, {name: "other"}, has_started=False)
    for value in DETERMINISTIC[name]:
        set_variables({name: DETERMINISTIC[name]}, {name: value}, has_started=True)


def test_cuda_that_has_started_without_them_is_an_error_and_the_others_are_left_alone():
    with pytest.raises(ConfigError, match="before CUDA starts, and it has started; set it in the environment, or"):
        set_variables(DETERMINISTIC, {}, has_started=True)
    environment: dict[str, str] = {}
    set_variables(ONE_QUEUE | EXPANDABLE, environment, has_started=True)
    assert not environment and not cuda_environment.added_variables()


@pytest.mark.parametrize("asked", [True, False])
def test_torchs_switch_is_that_of_the_run(asked):
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        prepare_cuda({}, deterministic=asked)
        assert torch.are_deterministic_algorithms_enabled() == asked
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # a plan for every shape; its default where there is a GPU
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
