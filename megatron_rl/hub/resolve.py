"""The local folders for a configuration's names on the hub: one rank decides the commits, one rank per node fetches.

``hub.json`` in the run's folder holds the commit of each name on the hub. So a resumed run reads
the same files even if a branch has moved.

No collective is used, since the run's process groups do not exist yet. Ranks communicate through
the job's store (distributed/agreement.py), and one rank's error is raised on all of them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from megatron_rl.config import RunConfig
from megatron_rl.distributed.agreement import Job, this_job
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.hub.data_files import fetch_data
from megatron_rl.hub.fetch import commit_of, fetch_model
from megatron_rl.hub.names import HubName, Kind, name_of
from megatron_rl.json_text import read_object

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)

PINS = "hub.json"
Names = Mapping[str, tuple[Kind, HubName]]


def local_paths(
    names: Names, run: RunConfig, *, without_weights: Collection[str], resumes: bool, pins: bool
) -> dict[str, str]:
    """Return {setting: local path} for the settings in ``names``, which hold names on the hub.

    names: {setting: (kind, name)}.
    without_weights: the settings of models whose config and tokenizer alone are fetched.
    resumes: whether the commits in the run's ``hub.json`` are used.
    pins: whether the commits are written to ``hub.json``.

    Raises ConfigError on every rank for a name that cannot be fetched, and if the other ranks do
    not answer in time.
    """
    job, wait_s = this_job(deadline_s=run.deadline_s), run.deadline_s
    file = run.path / PINS
    commits = _shared(job, "commits", job.rank == 0, lambda: _commits(names, file, resumes=resumes, pins=pins), wait_s)
    names = {
        key: (kind, dataclasses.replace(name, revision=commits[_pin(kind, name)]))
        for key, (kind, name) in names.items()
    }
    first = job.rank - int(os.environ.get("LOCAL_RANK", "0"))  # the first rank of this node
    return _shared(job, f"node/{first}", job.rank == first, lambda: _fetch(names, without_weights), wait_s)


def local_copies(
    urls: Mapping[str, tuple[Kind, str]], run: RunConfig, *, without_weights: Collection[str]
) -> dict[str, str]:
    """Return {setting: path of the local copy} for the settings in ``urls``; the first rank of a node copies.

    urls: {setting: (kind, URL)}.
    without_weights: the settings of models whose config and tokenizer alone are copied.

    Raises ConfigError on every rank if a copy fails, and if the other ranks do not answer in time.
    """
    from megatron_rl.hub.urls import copy_of  # only a run with URLs needs it

    def copied() -> dict[str, str]:
        return {key: copy_of(kind, url, key, weights=key not in without_weights) for key, (kind, url) in urls.items()}

    job = this_job(deadline_s=run.deadline_s)
    first = job.rank - int(os.environ.get("LOCAL_RANK", "0"))  # the first rank of this node
    return _shared(job, f"urls/{first}", job.rank == first, copied, run.deadline_s)


def fetched_folder(path: pathlib.Path | RemotePath, key: str, *, weights: bool = True) -> pathlib.Path:
    """Return the local folder of a model that a command names by a path, a URL or a name on the hub.

    key: the command's argument, for messages.
    weights: whether the model's weights are fetched too.
    """
    if "://" in str(path):
        from megatron_rl.hub.urls import copy_of  # only a command with a URL needs it

        return pathlib.Path(copy_of(Kind.MODEL, str(path), key, weights=weights))
    name = name_of(str(path), Kind.MODEL, key)
    if name is None:
        return path
    commit = commit_of(Kind.MODEL, name, key)
    return fetch_model(Kind.MODEL, dataclasses.replace(name, revision=commit), key, weights=weights)


def _pin(kind: Kind, name: HubName) -> str:
    return f"{kind.repo_type}s/{name.repo}@{name.revision or 'main'}"


def _commits(names: Names, file: pathlib.Path, *, resumes: bool, pins: bool) -> dict[str, str]:
    """Return {name: commit}; a commit is taken from the run's ``hub.json`` if it is there, else asked of the hub.

    A name in the result has a form such as ``models/owner/name@main``.

    file: the path of ``hub.json``.
    resumes: whether the file is read.
    pins: whether new commits are written to it.
    """
    known = read_object(file) if resumes and file.is_file() else {}
    commits = {}
    for key, (kind, name) in names.items():
        pin = _pin(kind, name)
        commit = commits.get(pin, known.get(pin))
        if commit is None:
            commit = commit_of(kind, name, key)
        elif pin not in commits:
            log.info("%s: %s is commit %s, as %s says; remove the file to ask again", key, name, commit, file)
        if not isinstance(commit, str) or len(commit) != 40:
            raise ConfigError(f"{file}: {quoted(pin, 300)} is {quoted(commit)}, no commit; mend or remove the file")
        commits[pin] = commit
    if pins and commits.items() - known.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps({**known, **commits}, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"run.dir={quoted(str(file.parent), 300)} cannot be written: {error}; name another folder"
            ) from error
    return commits


def _fetch(names: Names, without_weights: Collection[str]) -> dict[str, str]:
    paths = {}
    for key, (kind, name) in names.items():
        if kind is Kind.DATA:
            paths[key] = fetch_data(name, key)
        else:
            paths[key] = str(fetch_model(kind, name, key, weights=key not in without_weights))
        log.info("%s: %s is read from %s", key, name, pathlib.PurePath(paths[key]))
    return paths


def _shared(job: Job, what: str, is_mine: bool, make: Callable[[], dict], wait_s: float) -> dict[str, str]:
    """Return on every rank what ``make`` returns on one rank; an error of ``make`` is raised on every rank.

    what: a name for the result, under which the ranks exchange it in the job's store.
    is_mine: whether this rank calls ``make``; the other ranks wait for the result.
    make: takes nothing; returns a dict that JSON can hold.
    wait_s: the seconds that a rank waits before it raises ConfigError.
    """
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
