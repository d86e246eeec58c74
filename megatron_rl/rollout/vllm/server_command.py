"""The command line of a vLLM server for this trainer, as the supervisor, error messages and documents use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from megatron_rl.distributed.child_process import LAUNCHER_VARIABLES

MODULE = "vllm.entrypoints.openai.api_server"
API_KEY = "VLLM_API_KEY"  # an environment variable, since the host's process list shows arguments
# Without this variable a server has no routes for weights, cache and collective_rpc (vLLM 0.32.0,
# entrypoints/launchers/api_server/routers.py).
DEV_MODE = ("VLLM_SERVER_DEV_MODE", "1")
SCALE_OUT = "--enable-scale-out"
LOGPROBS_MODE = "processed_logprobs"
WORKER_EXTENSION = "megatron_rl.rollout.weight_sync.receiver.Receiver"

# With this variable /collective_rpc accepts pickled functions, so that anyone who reaches the port could run
# code. It is never passed on.
INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


def server_command(
    model: str, host: str, port: int, *extra: str, python: str = "python", module: str = MODULE
) -> list[str]:
    """Return the command line, as a list of arguments, that starts a vLLM server for this trainer.

    The command needs the environment of ``server_environment``.

    extra: further arguments of vLLM's server.
    module: the server's module, which ``python -m`` runs.
    """
    return [
        python,
        "-m",
        module,
        "--model",
        model,
        "--host",
        host,
        "--port",
        str(port),
        "--worker-extension-cls",
        WORKER_EXTENSION,
        "--weight-transfer-config",
        json.dumps({"backend": "megatron_rl"}),
        "--logprobs-mode",
        LOGPROBS_MODE,
        SCALE_OUT,
        "--middleware",
        "megatron_rl.rollout.vllm.auth_middleware.Guard",
        *extra,
    ]


def example(model: str, host: str, port: int) -> str:
    """Return the command that starts a server as one shell line, for messages and documents."""
    return f"{'='.join(DEV_MODE)} {shlex.join(server_command(model, host, port))}"


def server_environment(
    parent: Mapping[str, str], *, api_key: str | None, devices: Sequence[str] | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return (a server's environment variables, the names of the variables of ``parent`` that are left out).

    parent: the environment variables of the process that starts the server.
    devices: the server's GPUs; None: no restriction.
    """
    dropped = tuple(sorted(name for name in parent if name == INSECURE or LAUNCHER_VARIABLES.fullmatch(name)))
    environment = {name: value for name, value in parent.items() if name not in (*dropped, API_KEY)}
    environment.update([DEV_MODE])
    if api_key is not None:
        environment[API_KEY] = api_key
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return environment, dropped
