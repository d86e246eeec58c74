"""Start vLLM servers for a run with ``rollout.engine=vllm rollout.mode=server``, and keep them running.

    megatron-rl serve-vllm --model models/Qwen2.5-0.5B --replicas 2 --port 8000
    megatron-rl serve-vllm --model M --replicas 4 --tensor-parallel-size 2 -- --gpu-memory-utilization 0.8

Each replica is one server, with the next port, the next GPUs and a log file of its own. A server
that dies is started again, a limited number of times. All servers end with this process, however it
ends. The arguments after ``--`` go to vLLM unchanged.

Servers listen on 127.0.0.1 unless --host says otherwise. Any other address needs an API key, or
--allow-no-key. The environment variable that --api-key-env names holds the key. vLLM gets it
through its environment. vLLM's own check of the key covers /v1, /v2, /inference and /cohere. It
leaves open /tokenize, /metrics, /version and the routes that replace weights and call worker
methods (/update_weights, /collective_rpc, /sleep ...). The servers started here also run
megatron_rl/rollout/vllm/auth_middleware.py, which asks for the key on everything but /health.

Nothing is encrypted: the key, the prompts and the completions cross the network as plain text.
Between hosts that you do not own, put TLS or a private network around them. Weights that are sent
by broadcast use a port of their own, without a key.

On a CPU host, set VLLM_CPU_KVCACHE_SPACE=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1, and end the
command with -- --enforce-eager.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.rollout.vllm import server_command, supervisor

WHOLE = (
    "a server does not span hosts, nor pipeline stages; raise --tensor-parallel-size up to the host's GPUs, or take a "
    "host whose GPUs hold the model"
)
SEPARATE = "raise --replicas, which starts servers beside each other"
# vLLM's options that put one server on other GPUs than it is given here, or on several hosts.
SPANNING = {
    "--tensor-parallel-size": "it stands before the --",
    "-tp": "--tensor-parallel-size stands before the --",
    "--pipeline-parallel-size": WHOLE,
    "-pp": WHOLE,
    "--nnodes": WHOLE,
    "--data-parallel-size": SEPARATE,
    "-dp": SEPARATE,
}


def refuse_spanning(extra: Sequence[str]) -> None:
    """Raise ConfigError if an argument for vLLM gives a server more GPUs than ``--tensor-parallel-size`` says.

    extra: the arguments after ``--``, which go to vLLM.
    """
    for index, word in enumerate(extra):
        option, equals, value = word.partition("=")
        way_out = SPANNING.get(option.replace("_", "-"))
        value = value if equals else "".join(extra[index + 1 : index + 2])
        if way_out is not None and value != "1":
            raise ConfigError(
                f"{option} {quoted(value)} behind the -- would give a server other GPUs than the "
                f"--tensor-parallel-size of this host that it gets: {way_out}"
            )


def refuse_lossy_speculation(extra: Sequence[str]) -> None:
    """Raise ConfigError if an argument for vLLM lets speculative decoding sample from another distribution.

    extra: the arguments after ``--``, which go to vLLM: ``--speculative-config`` (``-sc``) with JSON, or
        with a field behind a dot.
    """
    from megatron_rl.validate.speculation import lossy

    for index, word in enumerate(extra):
        option, equals, value = word.partition("=")
        value = value if equals else "".join(extra[index + 1 : index + 2])
        name, _, field = option.partition(".")
        if name.replace("_", "-") not in ("--speculative-config", "-sc"):
            continue
        try:
            given = json.loads(value)
        except ValueError:
            given = value
        fields = {field.replace("-", "_"): given} if field else given
        if isinstance(fields, dict) and (fault := lossy(fields)):
            raise ConfigError(f"{option} behind the --: {fault}")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    own, extra = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, extra = arguments[:cut], arguments[cut + 1 :]
    head, _, examples = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="megatron-rl serve-vllm",
        description=head,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="the Hugging Face folder that the trainer's model.hf_path names")
    parser.add_argument("--replicas", type=int, default=1, help="number of servers (default 1)")
    parser.add_argument("--port", type=int, default=8000, help="of the first server, the others follow (default 8000)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this host only)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of this host per server (default 1)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument("--allow-no-key", action="store_true", help="open the servers to the network without a key")
    parser.add_argument(
        "--log-dir", type=pathlib.Path, default=pathlib.Path("vllm-logs"), help="folder of the log files"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=5, help="of all servers together within the window (default 5)"
    )
    parser.add_argument("--restart-window-s", type=float, default=600.0, help="(default 600)")
    parser.add_argument(
        "--ready-s", type=float, default=900.0, help="from start to /health, more counts as a death (default 900)"
    )
    parser.add_argument(
        "--sick-s", type=float, default=10.0, help="so long /health may refuse before a restart (default 10)"
    )
    parser.add_argument("--grace-s", type=float, default=15.0, help="from SIGTERM to SIGKILL (default 15)")
    parser.add_argument(
        "--module", default=server_command.MODULE, help=f"what python -m runs (default {server_command.MODULE})"
    )
    options = parser.parse_args(own)
    if options.replicas < 1 or options.tensor_parallel_size < 1 or options.max_restarts < 0:
        parser.error(
            f"--replicas {options.replicas}, --tensor-parallel-size {options.tensor_parallel_size} must be at least 1, "
            "--max-restarts 0"
        )
    return options, extra


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def specs_of(options: argparse.Namespace, extra: list[str]) -> list[supervisor.ServerSpec]:
    if options.api_key_env and not os.environ.get(options.api_key_env):
        raise ConfigError(
            f"--api-key-env {options.api_key_env} names an environment variable that is empty or not set; export it "
            "first"
        )
    refuse_spanning(extra)
    refuse_lossy_speculation(extra)
    api_key = os.environ[options.api_key_env] if options.api_key_env else None
    supervisor.check_exposure(options.host, api_key, "--api-key-env", options.allow_no_key)
    devices = supervisor.split_devices(
        supervisor.visible_devices(os.environ), options.replicas, options.tensor_parallel_size
    )
    # The servers import megatron_rl.rollout.weight_sync.receiver from here.
    root = str(pathlib.Path(__file__).resolve().parents[2])
    specs = []
    for index, own_devices in enumerate(devices):
        environment, dropped = server_command.server_environment(os.environ, api_key=api_key, devices=own_devices)
        if own_devices is None and options.replicas > 1:  # each would pin its threads to the same cores
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        if index == 0 and dropped:
            say(f"not passed on to the servers: {', '.join(dropped)}")
        command = server_command.server_command(
            options.model,
            options.host,
            options.port + index,
            "--tensor-parallel-size",
            str(options.tensor_parallel_size),
            *extra,
            python=sys.executable,
            module=options.module,
        )
        specs.append(
            supervisor.ServerSpec(
                name=f"server {index}",
                command=tuple(command),
                environment=environment,
                host=options.host,
                port=options.port + index,
                log_path=options.log_dir.resolve() / f"server{index}.log",
            )
        )
    return specs


def main(arguments: list[str] | None = None) -> int:
    options, extra = parse(sys.argv[1:] if arguments is None else arguments)
    limits = supervisor.Limits(
        restarts=options.max_restarts,
        window_s=options.restart_window_s,
        ready_s=options.ready_s,
        grace_s=options.grace_s,
        sick_s=options.sick_s,
    )
    try:
        return supervisor.Supervisor(specs_of(options, extra), limits, say).run()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
