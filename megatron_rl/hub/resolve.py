"""Replaces the hub's names in a configuration by local folders: one rank decides the commits, one a node fetches.

The commits stand in ``hub.json`` of the run's folder, by kind and name as it was written, so that a run that resumes
reads the same files though a branch has moved. Not a collective of the run's world, which does not exist yet: ranks
speak through the job's store (distributed/agreement.py), and a fault is raised on all of them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping

from megatron_rl.config import Config
from megatron_rl.distributed.agreement import Job, this_job
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.hub.data_files import fetch_data
from megatron_rl.hub.fetch import commit_of, fetch_model
from megatron_rl.hub.names import HubName, Kind, name_of
from megatron_rl.hub.settings import names_in, with_paths
from megatron_rl.json_text import read_object

log = logging.getLogger(__name__)

PINS = "hub.json"
Names = Mapping[str, tuple[Kind, HubName]]


def fetched(config: Config, *, weights: bool = True, pins: bool = True) -> Config:
    """Return the configuration with a local path in place of each name of the hub; the same one if it has none.

    weights: whether the policy's, critic's and teacher's are wanted; a dry run reads config and tokenizer alone.
    pins: whether the commits are written to the run's folder.
    Raises ConfigError on every rank for a name that cannot be fetched, and where the others do not answer in time.
    """
    names = names_in(config)
    if not names:
        return config
    job = this_job(deadline_s=config.run.deadline_s)
    wait_s = config.run.deadline_s
    commits = _shared(job, "commits", job.rank == 0, lambda: _commits(config, names, pins=pins), wait_s)
    names = {
        key: (kind, dataclasses.replace(name, revision=commits[_pin(kind, name)]))
        for key, (kind, name) in names.items()
    }
    first = job.rank - int(os.environ.get("LOCAL_RANK", "0"))  # of this node
    paths = _shared(job, f"node/{first}", job.rank == first, lambda: _fetch(config, names, weights=weights), wait_s)
    return with_paths(config, paths)


def fetched_folder(path: pathlib.Path, key: str) -> pathlib.Path:
    """Return the local folder of a model, with its weights, that a command names by a path or as on the hub."""
    name = name_of(str(path), Kind.MODEL, key)
    if name is None:
        return path
    commit = commit_of(Kind.MODEL, name, key)
    return fetch_model(Kind.MODEL, dataclasses.replace(name, revision=commit), key, weights=True)


def _pin(kind: Kind, name: HubName) -> str:
    return f"{kind.repo_type}s/{name.repo}@{name.revision or 'main'}"


def _commits(config: Config, names: Names, *, pins: bool) -> dict[str, str]:
    """Return the commit of each name: the one of the run's folder, else the hub's of today, which is written there."""
    file = config.run.path / PINS
    known = read_object(file) if config.checkpoint.resume != "never" and file.is_file() else {}
    found = {}
    for key, (kind, name) in names.items():
        pin = _pin(kind, name)
        commit = found.get(pin, known.get(pin))
        if commit is None:
            commit = commit_of(kind, name, key)
        elif pin not in found:
            log.info("%s: %s is commit %s, as %s says; remove the file to ask again", key, name, commit, file)
        if not isinstance(commit, str) or len(commit) != 40:
            raise ConfigError(f"{file}: {quoted(pin, 300)} is {quoted(commit)}, no commit; mend or remove the file")
        found[pin] = commit
    if pins and found.items() - known.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps({**known, **found}, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"run.dir={quoted(str(file.parent), 300)} cannot be written: {error}; name another folder"
            ) from error
    return found


def _fetch(config: Config, names: Names, *, weights: bool) -> dict[str, str]:
    paths = {}
    for key, (kind, name) in names.items():
        if kind is Kind.DATA:
            paths[key] = fetch_data(name, key)
        else:
            wanted = key == "reward.model_path" or (
                weights and (key != "model.hf_path" or config.model.init == "pretrained")
            )
            paths[key] = str(fetch_model(kind, name, key, weights=wanted))
        log.info("%s: %s is read from %s", key, name, pathlib.PurePath(paths[key]))
    return paths


def _shared(job: Job, what: str, is_mine: bool, make: Callable[[], dict], wait_s: float) -> dict[str, str]:
    """Return what one rank makes, or raise on every rank the ConfigError that it met; the others wait for it."""
    if is_mine or job.store is None:
        try:
            made = make()
        except Exception as error:
            job.tell(f"hub/{what}", json.dumps({"fault": str(error)}))
            raise
        job.tell(f"hub/{what}", json.dumps({"made": made}))
        return made
    said = job.told(f"hub/{what}", wait_s)
    if said is None:
        raise ConfigError(
            f"rank {job.rank} waited {wait_s:g} s (run.deadline_s) for another process to fetch what the hub names: "
            "see its log; raise run.deadline_s, or fetch first, by hf download"
        )
    answer = json.loads(said)
    if "fault" in answer:
        raise ConfigError(answer["fault"])
    return answer["made"]
