"""The server's start and its loops: all ranks build the model, rank 0 listens to clients, all run what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import NoReturn

from megatron_rl import hub
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import (
    Config,
    DataConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    ServeConfig,
    SftConfig,
    WeightSyncConfig,
    config_to_yaml,
)
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import this_job
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.distributed.http_access import is_loopback, keys_in
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.watchdog import open_watchdog
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.rollout.engines.embedded import stop_tokens
from megatron_rl.rollout.http_server import listening
from megatron_rl.serve.coordinator import Coordinator, note_end, restore_lines
from megatron_rl.serve.handlers import RequestHandlers, ServedModel
from megatron_rl.serve.journal import Journal
from megatron_rl.serve.models import Models
from megatron_rl.serve.operations import Operations
from megatron_rl.serve.registry import Registry
from megatron_rl.serve.samplers import Samplers
from megatron_rl.serve.store import Store
from megatron_rl.serve.worker import Message, Outcome, Worker, share_message
from megatron_rl.trainer.run_folder import held_run_folder
from megatron_rl.validate import check_lengths
from megatron_rl.weights.config_json import check_served, load_hf_config
from megatron_rl.weights.model_dtype import settle_dtype

log = logging.getLogger(__name__)
STORE, CHECKPOINTS, MODELS = "serve.sqlite", "checkpoints", "models"


def check_config(
    model: ModelConfig,
    rollout: RolloutConfig,
    weight_sync: WeightSyncConfig,
    loss: LossConfig,
    sft: SftConfig,
    optimizer: OptimizerConfig,
    settings: ServeConfig,
) -> None:
    """Raise ConfigError for settings under which Tinker's API cannot be served."""
    if not os.path.isfile(os.path.join(model.hf_path, "config.json")):
        raise ConfigError(
            f"model.hf_path={quoted(model.hf_path, 300)} holds no config.json; give a local Hugging Face "
            "directory, or owner/name of the hub"
        )
    if rollout.temperature != 1.0:
        raise ConfigError(
            f"rollout.temperature={rollout.temperature} is the trainer's too, and Tinker's losses read "
            "log-probs at 1; set rollout.temperature=1.0: clients set the temperature of their samples"
        )
    for key, value in (("loss.kl_coefficient", loss.kl_coefficient), ("sft.steps", sft.steps)):
        if value:
            raise ConfigError(
                f"{key}={value} belongs to a training run, and a server's clients bring their own losses; remove it"
            )
    if optimizer.algorithm != "adam":
        raise ConfigError(
            f"optimizer.algorithm={optimizer.algorithm} is for a run, and a server's clients send AdamW's settings "
            "with each step; set optimizer.algorithm=adam"
        )
    if rollout.routing_replay != "off":
        raise ConfigError(
            f"rollout.routing_replay={rollout.routing_replay} replays experts that come with a run's own "
            "rollouts, and a client's samples bring none; set rollout.routing_replay=off"
        )
    if weight_sync.adapters != "merged":
        raise ConfigError(
            f"weight_sync.adapters={weight_sync.adapters} is for one policy, and a server's engines take turns "
            "between its clients' models; set weight_sync.adapters=merged"
        )
    keys_of(settings)


def keys_of(settings: ServeConfig) -> tuple[str, ...]:
    """Return the keys that clients may present. Raises ConfigError if the address needs a key and none is set."""
    name, host = settings.api_key_env, settings.host
    keys = keys_in(name, setting="serve.api_key_env")
    if name is None and not is_loopback(host):
        raise ConfigError(
            f"serve.host={host} can be reached from other hosts; name a variable that holds the clients' keys by "
            "serve.api_key_env, or listen at 127.0.0.1"
        )
    return keys


def serve(config: Config) -> bool:
    """Serve Tinker's API until the process is asked to end. Returns True: the run was not preempted."""
    check_config(
        config.model, config.rollout, config.weight_sync, config.loss, config.sft, config.optimizer, config.serve
    )
    hf_config = load_hf_config(config.model.hf_path)
    if config.rollout.engine == "vllm":
        check_served(config.model.hf_path)
        # The engines are started for the length of a prompt and its response.
        check_lengths(config.data, config.rollout, hf_config.max_position_embeddings)
    # A gradient that is not finite becomes an error for its client. The step is skipped, and no weight changes.
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, on_nonfinite="skip"))
    with held_run_folder(config.run.path, config.run.deadline_s):
        model = settle_dtype(config.model, hf_config, on_gpu=HOST.is_cuda)
        config = dataclasses.replace(config, model=model)
        tokenizer = load_tokenizer(config.model, hf_config.vocab_size)
        this_job(deadline_s=config.run.deadline_s).wait_for_all(config.run.deadline_s)
        backend = MegatronBackend(config, hf_config=hf_config)
        if config.serve.logprobs == "all":  # log-probs are wanted for every datum's prompt too
            backend.rules = dataclasses.replace(backend.rules, share_prompts=False)
        with open_watchdog(
            backend.topology, config.run.deadline_s, slow_stage_s=config.run.slow_stage_s, say=log.info
        ) as watchdog:
            with watchdog.stage("start"):
                models = Models(backend)
                samplers = Samplers(models, tokenizer)
                worker = Worker(config.serve, models, samplers, watchdog)
                backend.frozen_checksum()  # a collective, done now so that the first save is faster
            with contextlib.closing(samplers):
                if not backend.topology.is_main:
                    follow(worker)
                served = served_model(
                    *(config.model, config.data, config.rollout, config.lora, config.serve),
                    *(backend, tokenizer),
                    seed=config.run.seed,
                )
                lead(worker, served, config.serve, config.run.path, config_to_yaml(config))
        backend.close()
    return True


def follow(worker: Worker) -> NoReturn:
    """Receive and run rank 0's messages for ever, on a rank other than rank 0."""
    while True:
        worker.run(share_message(None))


def lead(
    worker: Worker, served: ServedModel, settings: ServeConfig, folder: pathlib.Path, config_yaml: str
) -> NoReturn:
    """Listen to clients on rank 0, and run their operations on all ranks, for ever.

    served: the description of the model.
    folder: the run's folder.
    config_yaml: the run's settings as YAML, which are written to the run's folder.
    """
    replace_text(folder / "config.yaml", config_yaml)
    store = Store(folder / STORE)
    registry = Registry(store, (folder / CHECKPOINTS).absolute())
    operations = Operations(
        gap_s=settings.gap_s,
        queue_s=settings.queue_s,
        max_bytes=int(settings.max_queue_mb * 2**20),
        max_batch=settings.max_batch_samples,
        ended=note_end(registry),
    )
    losers = restore_lines(registry, operations)
    if losers:
        log.warning("%d models go on from an earlier state; their clients are told what is lost", losers)
    handlers = RequestHandlers(served, registry, operations, max_samples=settings.max_batch_samples)

    def run(message: Message) -> Outcome:
        return worker.run(share_message(message))

    with serving_clients(settings, registry, handlers, operations) as address:
        rank = f"adapters of rank {served.lora_rank} at most" if served.lora_rank else "every weight"
        degrees = worker.models.backend.topology.degrees
        log.info("serving %s at %s (%s): %s is trained", served.name, address, degrees, rank)
        coordinator = Coordinator(settings, registry, operations, Journal(folder / MODELS, config_yaml), run)
        while True:
            coordinator.step()


def served_model(
    model: ModelConfig,
    data: DataConfig,
    rollout: RolloutConfig,
    lora: LoraConfig,
    settings: ServeConfig,
    backend: MegatronBackend,
    tokenizer,
    *,
    seed: int,
) -> ServedModel:
    """Return the description of the served model, from the settings, the backend and the tokenizer.

    seed: ``run.seed``.
    """
    path = model.hf_path
    tokenizer_path = model.tokenizer_path or path
    repo, absolute = hub.repo_of(tokenizer_path), pathlib.Path(tokenizer_path).absolute()
    context = backend.shape.context_tokens
    own_engines = rollout.engine == "vllm"
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    return ServedModel(
        name=settings.base_model or pathlib.Path(hub.repo_of(path)).resolve().name,
        tokenizer_id=settings.tokenizer_id or (repo if repo != tokenizer_path else str(absolute)),
        family=backend.shape.family,
        vocab_size=backend.shape.vocab_size,
        context_tokens=context,
        longest=min(context, longest) if own_engines else context,
        lora_rank=lora.rank,
        stop_ids=tuple(stop_tokens(path, tokenizer, backend.shape.vocab_size)),
        lora_targets=lora.targets,
        top_logprobs=not own_engines,
        seed=seed,
    )


@contextlib.contextmanager
def serving_clients(
    settings: ServeConfig, registry: Registry, handlers: RequestHandlers, operations: Operations
) -> Iterator[str]:
    """Listen for clients in a thread within the block; yield the server's address.

    Raises RunError if the server cannot listen.
    """
    from megatron_rl.serve.routes import Routes

    routes = Routes(settings, registry, handlers, operations, keys_of(settings))
    with listening(routes.app, settings.host, settings.port, section="serve") as address:
        yield address
