"""The answers to clients' queries about training runs, checkpoints, samplers and sessions, read from the registry.

Each answer is a JSON-able dict.
"""

from __future__ import annotations

import datetime

from megatron_rl.serve import naming
from megatron_rl.serve.coordinator import remove_checkpoint
from megatron_rl.serve.handlers import ServedModel
from megatron_rl.serve.registry import Registry
from megatron_rl.serve.store import Row

KINDS = {naming.STATE: "training", naming.SAMPLER: "sampler"}


def capabilities(served: ServedModel) -> dict[str, object]:
    """Return the answer with the list of served models, which has one entry."""
    model = {
        "model_name": served.name,
        "max_context_length": served.context_tokens,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


def model_info(served: ServedModel, row: Row) -> dict[str, object]:
    """Return the answer to a training client's ``get_info``."""
    spec = row.facts["spec"]
    data = {"arch": served.family, "model_name": served.name, "tokenizer_id": served.tokenizer_id}
    return {
        "type": "get_info",
        "model_id": row.id,
        "model_data": data,
        "model_name": served.name,
        "is_lora": spec is not None,
        "lora_rank": None if spec is None else spec["rank"],
    }


def training_runs(registry: Registry, owner: str) -> dict[str, object]:
    """Return the answer with all training runs of a client. ``owner``: a digest of the client's key."""
    runs = [_run(registry, row) for row in registry.store.of_owner("models", owner)]
    return {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}


def training_run(registry: Registry, owner: str, model: str) -> dict[str, object]:
    """Return the answer with one training run of a client. ``owner``: a digest of the client's key."""
    return _run(registry, registry.model(model, owner))


def _run(registry: Registry, row: Row) -> dict[str, object]:
    spec = row.facts["spec"]
    saved = [_checkpoint(x) for x in registry.store.of_owner("checkpoints", row.owner, row.id)]
    newest = {kind: next((x for x in saved if x["checkpoint_type"] == kind), None) for kind in KINDS.values()}
    return {
        "training_run_id": row.id,
        "base_model": row.facts["base_model"],
        "model_owner": row.owner,
        "is_lora": spec is not None,
        "lora_rank": None if spec is None else spec["rank"],
        "last_request_time": _time(row.created),
        "last_checkpoint": newest["training"],
        "last_sampler_checkpoint": newest["sampler"],
        "user_metadata": row.facts["metadata"],
    }


def checkpoints(registry: Registry, owner: str, model: str | None) -> dict[str, object]:
    """Return the answer with a client's checkpoints.

    owner: a digest of the client's key.
    model: the model whose checkpoints are listed; None lists the checkpoints of all models of the
        client.
    """
    if model is not None:
        registry.model(model, owner)
    rows = [_checkpoint(row) for row in registry.store.of_owner("checkpoints", owner, model)]
    return {"checkpoints": rows, "cursor": {"offset": 0, "limit": len(rows), "total_count": len(rows)}}


def _checkpoint(row: Row) -> dict[str, object]:
    path = naming.parse_checkpoint(row.id)
    return {
        "checkpoint_id": path.id,
        "checkpoint_type": KINDS[path.kind],
        "time": _time(row.created),
        "tinker_path": row.id,
        "size_bytes": row.facts["bytes"],
        "user_metadata": row.facts["metadata"] or None,
        "expires_at": None if row.facts["expires"] is None else _time(row.facts["expires"]),
    }


def weights_info(registry: Registry, owner: str, path: str) -> dict[str, object]:
    """Return the answer with the base model's name and the LoRA settings of the checkpoint ``path``.

    A client needs them to continue training from it.
    """
    row = registry.checkpoint(path, owner)
    spec = row.facts["spec"]
    if spec is None:
        return {"base_model": row.facts["base_model"], "is_lora": False}
    return {
        "base_model": row.facts["base_model"],
        "is_lora": True,
        "lora_rank": spec["rank"],
        "train_unembed": False,
        "train_mlp": spec["mlp"],
        "train_attn": spec["attention"],
    }


def session(registry: Registry, owner: str, id: str) -> dict[str, object]:
    """Return the answer with the training runs and samplers of the session ``id``."""
    row = registry.known_session(id, owner)
    return {
        "training_run_ids": [x.id for x in registry.store.of_owner("models", owner, id)],
        "sampler_ids": [x.id for x in registry.store.of_owner("samplers", owner, id)],
        "user_metadata": row.facts.get("user_metadata"),
        "display_name": row.facts.get("display_name"),
    }


def sampler(registry: Registry, owner: str, id: str) -> dict[str, object]:
    """Return the answer that names the weights from which the sampling session ``id`` samples."""
    row = registry.sampler(id, owner)
    return {"sampler_id": id, "base_model": row.facts["base_model"], "model_path": row.facts["path"]}


def remove(registry: Registry, owner: str, path: str) -> dict[str, object]:
    """Remove a client's checkpoint from the registry and from disk; return an empty answer."""
    registry.checkpoint(path, owner)
    remove_checkpoint(registry, path)
    return {}


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).isoformat()
