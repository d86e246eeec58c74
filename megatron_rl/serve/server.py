"""A server's life: its parts are built on every rank, the front opens on rank 0, and all ranks run one loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator

from megatron_rl import hub
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import Config, config_to_yaml
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import this_job
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.watchdog import Watchdog, open_watchdog
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.rollout.http_server import is_loopback, keys_in, listening
from megatron_rl.rollout.transformers_engine import stop_tokens
from megatron_rl.serve.books import Books
from megatron_rl.serve.dispatch import Dispatcher, note_end, restore_lines
from megatron_rl.serve.intake import Intake, ServedModel
from megatron_rl.serve.journal import Journal
from megatron_rl.serve.models import Models
from megatron_rl.serve.operations import Operations
from megatron_rl.serve.samplers import Samplers
from megatron_rl.serve.store import Store
from megatron_rl.serve.worker import Message, Outcome, Worker, share_message
from megatron_rl.trainer.run_folder import held_run_folder
from megatron_rl.validate import check_lengths
from megatron_rl.weights.config_json import check_served, load_hf_config
from megatron_rl.weights.model_dtype import settle_dtype

log = logging.getLogger(__name__)
STORE, CHECKPOINTS, MODELS = "serve.sqlite", "checkpoints", "models"


def check_config(config: Config) -> None:
    """Raise ConfigError for settings under which Tinker's API cannot be served."""
    if not os.path.isfile(os.path.join(config.model.hf_path, "config.json")):
        raise ConfigError(
            f"model.hf_path={quoted(config.model.hf_path, 300)} holds no config.json; give a local Hugging Face "
            "directory, or owner/name of the hub"
        )
    if config.rollout.temperature != 1.0:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature} is the trainer's too, and Tinker's losses read "
            "log-probs at 1; leave it at 1.0: clients set the temperature of their samples"
        )
    for key, value in (("loss.kl_coefficient", config.loss.kl_coefficient), ("sft.steps", config.sft.steps)):
        if value:
            raise ConfigError(f"{key}={value} belongs to a training run, and a server's clients bring their own losses")
    if config.rollout.routing_replay != "off":
        raise ConfigError(
            f"rollout.routing_replay={config.rollout.routing_replay} replays experts that come with a run's own "
            "rollouts, and a client's samples bring none; set it to off"
        )
    if config.weight_sync.adapters != "merged":
        raise ConfigError(
            f"weight_sync.adapters={config.weight_sync.adapters} is for one policy, and a server's engines take turns "
            "between its clients' models; set it to merged"
        )
    keys_of(config)


def keys_of(config: Config) -> tuple[str, ...]:
    """Return the keys that clients may present. Raises ConfigError where the address needs one and there is none."""
    name, host = config.serve.api_key_env, config.serve.host
    keys = keys_in(name, setting="serve.api_key_env")
    if name is None and not is_loopback(host):
        raise ConfigError(
            f"serve.host={host} can be reached from other hosts; name a variable that holds the clients' keys by "
            "serve.api_key_env, or listen at 127.0.0.1"
        )
    return keys


def serve(config: Config) -> bool:
    """Serve until the process is told to end. Returns True: there is nothing to come back for."""
    check_config(config)
    hf_config = load_hf_config(config.model.hf_path)
    if config.rollout.engine == "vllm":
        check_served(config.model.hf_path)
        check_lengths(config, hf_config.max_position_embeddings)  # the engines are started for that length
    # a gradient that is not finite is an answer to its client: the step is passed over, and nothing is moved
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, on_nonfinite="skip"))
    with held_run_folder(config):
        config = settle_dtype(config, hf_config, on_gpu=HOST.is_cuda)
        tokenizer = load_tokenizer(config, hf_config.vocab_size)
        this_job(deadline_s=config.run.deadline_s).wait_for_all(config.run.deadline_s)
        backend = MegatronBackend(config, hf_config=hf_config)
        if config.serve.logprobs == "all":  # every datum's prompt has log-probs of its own
            backend.rules = dataclasses.replace(backend.rules, share_prompts=False)
        with open_watchdog(
            backend.topology, config.run.deadline_s, slow_stage_s=config.run.slow_stage_s, say=log.info
        ) as watchdog:
            _run(config, backend, tokenizer, watchdog)
        backend.close()
    return True


def _run(config: Config, backend: MegatronBackend, tokenizer, watchdog: Watchdog) -> None:
    with watchdog.stage("start"):
        models = Models(backend)
        samplers = Samplers(config, models, tokenizer)
        worker = Worker(config, models, samplers, watchdog)
        backend.frozen_checksum()  # a collective that the first save would be slower by
    try:
        if not backend.topology.is_main:
            while True:
                worker.run(share_message(None))
        with _fronted(config, backend, tokenizer, worker) as dispatcher:
            while True:
                dispatcher.step()
    finally:
        samplers.close()


@contextlib.contextmanager
def _fronted(config: Config, backend: MegatronBackend, tokenizer, worker: Worker) -> Iterator[Dispatcher]:
    """Open the books and the front on rank 0, and yield what runs the operations."""
    settings, folder = config.serve, config.run.path
    replace_text(folder / "config.yaml", config_to_yaml(config))
    store = Store(folder / STORE)
    books = Books(store, (folder / CHECKPOINTS).absolute())
    operations = Operations(
        gap_s=settings.gap_s,
        queue_s=settings.queue_s,
        max_bytes=int(settings.max_queue_mb * 2**20),
        max_batch=settings.max_batch_samples,
        ended=note_end(books),
    )
    losers = restore_lines(books, operations)
    if losers:
        log.warning("%d models go on from an earlier state; their clients are told what is lost", losers)
    served = served_model(config, backend, tokenizer)
    intake = Intake(config, served, books, operations)

    def run(message: Message) -> Outcome:
        return worker.run(share_message(message))

    with opened_front(config, books, intake, operations) as address:
        rank = f"adapters of rank {served.lora_rank} at most" if served.lora_rank else "every weight"
        log.info("serving %s at %s (%s): %s is trained", served.name, address, backend.topology.degrees, rank)
        journal = Journal(folder / MODELS, config_to_yaml(config))
        yield Dispatcher(settings, books, operations, journal, run)
    store.close()


def served_model(config: Config, backend: MegatronBackend, tokenizer) -> ServedModel:
    """Return the description of the model that is served."""
    path = config.model.hf_path
    tokenizer_path = config.model.tokenizer_path or path
    repo, absolute = hub.repo_of(tokenizer_path), pathlib.Path(tokenizer_path).absolute()
    context = backend.shape.context_tokens
    own_engines = config.rollout.engine == "vllm"
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return ServedModel(
        name=config.serve.base_model or pathlib.Path(hub.repo_of(path)).resolve().name,
        tokenizer_id=config.serve.tokenizer_id or (repo if repo != tokenizer_path else str(absolute)),
        family=backend.shape.family,
        vocab_size=backend.shape.vocab_size,
        context_tokens=context,
        longest=min(context, longest) if own_engines else context,
        lora_rank=config.lora.rank,
        stop_ids=tuple(stop_tokens(path, tokenizer, backend.shape.vocab_size)),
    )


@contextlib.contextmanager
def opened_front(config: Config, books: Books, intake: Intake, operations: Operations) -> Iterator[str]:
    """Listen in a thread within the block; yield the address. Raises RunError where it cannot."""
    from megatron_rl.serve.front import Front

    settings = config.serve
    front = Front(settings, books, intake, operations, keys_of(config))
    with listening(front.app, settings.host, settings.port, section="serve") as address:
        yield address
