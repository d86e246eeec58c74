"""The checks of a drafter with weights before engines start: a draft model, an EAGLE head, or a checkpoint's MTP heads.

The facts of vLLM are those of 0.32.0 (config/speculative.py).
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Mapping

from megatron_rl.config.rollout import WEIGHT_DRAFTERS, RolloutConfig
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import read_object
from megatron_rl.weights.config_json import CONFIG, MOST_CONFIG_BYTES, read_fields
from megatron_rl.weights.reader import INDEX, SINGLE, has_weights

KEY = "rollout.vllm.speculative_config.model"
# By these parts of a folder's path vLLM takes a draft model for a drafter of another kind.
MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")
NESTED = ("transformer_layer_config", "text_config")  # of config.json: hold the sizes of some heads


def frozen_arguments(rollout: RolloutConfig, hf_path: str, room: int, *, sleeps: bool) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs for a drafter with weights; {} for any other.

    The drafter is loaded from its files, while the policy's weights come by sync. A sleep of level 2
    keeps it in the host's memory.

    hf_path: the policy's folder.
    room: the maximum of tokens of a request and its draft.
    sleeps: whether the engine shares its GPU with the trainer.

    Raises ConfigError for a folder whose model cannot draft for the policy.
    """
    if rollout.speculation not in WEIGHT_DRAFTERS:
        return {}
    if rollout.speculation == "mtp":
        fields = read_fields(hf_path)
        _check_heads(hf_path, fields)
        folder = pathlib.Path(hf_path)
    else:
        folder = pathlib.Path(rollout.vllm["speculative_config"]["model"])
        fields = _check_folder(folder, rollout.speculation)
        _check_vocabulary(folder, fields, hf_path)
        _check_length(folder, fields, room)
    if rollout.speculation == "draft_model":
        _check_draft_model(folder, hf_path)
    if sleeps and fields.get("kv_lora_rank"):
        raise ConfigError(
            f"rollout.speculation={rollout.speculation}: {folder} has latent attention (kv_lora_rank="
            f"{fields['kv_lora_rank']}), and vLLM does not keep what it derives from its weights while an engine "
            "sleeps; set rollout.sleep=never, or rollout.speculation=off"
        )
    return {"sleep_preserve_parameter_names": ["draft.*"]} if sleeps else {}


def _check_folder(folder: pathlib.Path, drafter: str) -> Mapping[str, object]:
    """Return the fields of a drafter's config.json, with sizes that lie deeper. Raises ConfigError for another folder.

    drafter: ``rollout.speculation``, for messages.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{KEY}={str(folder)!r} holds no {CONFIG}; give the local folder of the drafter")
    if not has_weights(folder):
        raise ConfigError(
            f"{KEY}={str(folder)!r} holds neither {SINGLE} nor {INDEX}; rollout.speculation={drafter} loads the "
            "drafter's weights from there"
        )
    fields = read_object(folder / CONFIG, most_bytes=MOST_CONFIG_BYTES)
    inner = next((fields[name] for name in NESTED if isinstance(fields.get(name), dict)), {})
    return inner | {name: value for name, value in fields.items() if value is not None}


def _check_vocabulary(folder: pathlib.Path, fields: Mapping[str, object], hf_path: str) -> None:
    """Raise ConfigError unless drafter and policy have the same number of tokens."""
    policy = read_fields(hf_path).get("vocab_size")
    if fields.get("vocab_size") != policy:
        raise ConfigError(
            f"{folder / CONFIG} has vocab_size={quoted(fields.get('vocab_size'))} and {hf_path} has {policy}; a "
            f"drafter drafts token ids of the policy. Name one of the policy's vocabulary by {KEY}, or set "
            "rollout.speculation=off"
        )


def _check_length(folder: pathlib.Path, fields: Mapping[str, object], room: int) -> None:
    """Raise ConfigError if the drafter takes fewer tokens than the longest request and its draft have."""
    most, rope = fields.get("max_position_embeddings"), fields.get("rope_scaling") or fields.get("rope_parameters")
    is_plain = (rope or {}).get("rope_type", "default") == "default"
    if isinstance(most, int) and most < room and is_plain:
        raise ConfigError(
            f"{folder / CONFIG} has max_position_embeddings={most}, and the longest request and its draft have {room} "
            "tokens; lower data.max_prompt_tokens or rollout.max_response_tokens, or set rollout.speculation=off"
        )


def _check_draft_model(folder: pathlib.Path, hf_path: str) -> None:
    """Raise ConfigError for a draft model of another tokenizer, or whose path vLLM would take for another drafter's."""
    if misleading := [part for part in MISLEADING if part in str(folder).lower()]:
        raise ConfigError(
            f"{KEY}={str(folder)!r} has {misleading[0]!r} in its path, by which vLLM takes it for no draft model; "
            "rename the folder, or name a link to it"
        )
    own, policy = (_tokens(pathlib.Path(x)) for x in (folder, hf_path))
    if own is None or policy is None or own == policy:
        return
    token = next(x for x in itertools.chain(policy, own) if own.get(x) != policy.get(x))
    raise ConfigError(
        f"{folder / 'tokenizer.json'} gives {quoted(token)} the id {own.get(token)} and the one of {hf_path} "
        f"{policy.get(token)}; a draft model needs the policy's tokens. Name another by {KEY}, or set "
        "rollout.speculation=off"
    )


def _tokens(folder: pathlib.Path) -> dict[str, object] | None:
    """Return {token: id} of a folder's tokenizer.json; None without such a file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    fields = read_object(path)
    vocabulary = (fields.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score, in the order of the ids
        vocabulary = {json.dumps(pair[0]): number for number, pair in enumerate(vocabulary)}
    return vocabulary | {x["content"]: x["id"] for x in fields.get("added_tokens") or ()}


def _check_heads(hf_path: str, fields: Mapping[str, object]) -> None:
    """Raise ConfigError unless the policy's folder has layers that predict further tokens, and their weights."""
    if not (fields.get("num_nextn_predict_layers") or fields.get("mtp_num_hidden_layers")):
        raise ConfigError(
            f"rollout.speculation=mtp: {hf_path}/{CONFIG} has no num_nextn_predict_layers or mtp_num_hidden_layers, so "
            "the checkpoint brings no MTP heads; take another drafter, or off"
        )
    if not has_weights(hf_path):
        raise ConfigError(
            f"rollout.speculation=mtp: {hf_path} holds neither {SINGLE} nor {INDEX}, and the heads' weights come from "
            "there; take another drafter, or off"
        )
