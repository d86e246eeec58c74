"""The check of a translated configuration, as far as it can be done without the run's model, data and rewards.

It loads the configuration as a run would, checks that its sections agree, and lists what could not
be checked.
"""

from __future__ import annotations

import copy
import os
import pathlib
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.commands.translate.translation import MISSING, Translation
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.validate import check_lengths, validate_config

_OF_THE_SKIP = "skip.mode=exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Holds the results of checking a translated configuration.

    faults: the reasons why a run with this configuration would not start. Keys that the user still
        has to fill in are not among them.
    done: the properties that were checked, in words.
    not_done: the properties that were not checked, in words.
    """

    faults: tuple[str, ...]
    done: tuple[str, ...]
    not_done: tuple[str, ...]


def nested(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts made of a mapping with dotted keys: {"a.b": 1} becomes {"a": {"b": 1}}."""
    sections: dict[str, Any] = {}
    for key, value in sorted(ours.items()):
        *path, last = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return sections


def checked(translation: Translation) -> Check:
    """Check a translation's settings, except those that the user still has to fill in; return the Check.

    The model's context length is only checked if its config is on this host. Data rows are never
    read.
    """
    # Load the settings that are known.
    ours = {key: value for key, value in translation.ours.items() if value != MISSING}
    try:
        config = load_config(nested(ours))
    except ConfigError as error:
        return Check(faults=(str(error),), done=(), not_done=("how the sections agree",))
    done, not_done, faults = ["each value, by loading it", "how the sections agree"], [], []
    if translation.open:
        not_done.append(f"what depends on {', '.join(translation.open)}")
    # Check the sections against one another, with stand-ins for missing models.
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text("{}", encoding="utf-8")
        models = {"model.hf_path": config.model.hf_path, "critic.hf_path": config.critic.hf_path}
        rewards = config.train.num_rollouts != 0 and not config.reward.functions and not config.has_teacher
        stand_ins = _stand_ins(models, folder, open_keys=translation.open, rewards=rewards, not_done=not_done)
        faults += _faults(nested(ours | stand_ins))
    # Check the lengths against the model, if its config is here.
    if "model.hf_path" not in stand_ins and config.model.hf_path:
        from megatron_rl.weights.config_json import read_hf_config  # imports torch

        try:
            model = read_hf_config(config.model.hf_path, "model.hf_path")
            if config.generates:
                check_lengths(config.data, config.rollout, model.max_position_embeddings)
                done.append("the lengths, against the model's context")
        except ConfigError as error:
            faults.append(str(error))
    # Note that the rows were not read.
    missing = [path for path in config.data.train if not os.path.exists(path) and not any(c in path for c in "*?[")]
    if not config.data.train:
        not_done.append("the rows: data.train names no file")
    elif missing:
        not_done.append(f"the rows: {quoted(missing[0], 200)} is not here")
    else:
        not_done.append("the rows: megatron-rl train --dry-run reads them")
    return Check(faults=tuple(dict.fromkeys(faults)), done=tuple(done), not_done=tuple(not_done))


def _stand_ins(
    models: Mapping[str, str | None], folder: str, *, open_keys: Collection[str], rewards: bool, not_done: list[str]
) -> dict[str, Any]:
    """Return {our key: temporary value} for each missing model, evaluation set and reward.

    With these values the other settings can be checked.

    models: {our key: the model's folder as translated, or None}, for ``model.hf_path`` and
        ``critic.hf_path``.
    folder: a folder with an empty config.json, the temporary value for a missing model.
    open_keys: the keys that the user still has to fill in.
    rewards: whether the user still has to name reward functions.
    not_done: a list of sentences, to which one is added for each missing model, and one if rewards
        are missing.
    """
    stand_ins: dict[str, Any] = {}
    for key, path in models.items():
        needed = key == "model.hf_path" or path is not None
        if needed and not os.path.isfile(os.path.join(path or "", "config.json")):
            stand_ins[key] = folder
            what = f"{key}={quoted(path, 200)} is no folder here" if path else f"{key} names none"
            not_done.append(f"the model: {what}; a name on the hub is fetched at the start (docs/object-storage.md)")
    if "eval.sets" in open_keys:
        stand_ins["eval.sets"] = {"test": folder}
    if rewards:
        stand_ins["reward.functions"] = ["arithmetic"]
        not_done.append("the rewards: reward.functions is to be named")
    return stand_ins


def _faults(settings: dict[str, Any]) -> list[str]:
    """Return the reasons why a run with these settings would not start; [] if it would.

    Loading stops at the first fault. If that is a conflict with the default ``skip.mode=exact``, the
    check is repeated with ``skip.mode=off`` to find other faults.
    """
    try:
        validate_config(load_config(settings))
    except ConfigError as error:
        faults = [str(error)]
        if _OF_THE_SKIP in faults[0] and settings.get("skip", {}).get("mode") is None:
            without = copy.deepcopy(settings)
            without.setdefault("skip", {})["mode"] = "off"
            faults += _faults(without)
        return faults
    return []
