"""The weights that clients sample with, and the engines that hold them: one set at a time, on all ranks.

Weights that a client has named are on disk, and are read at the first request for them. Unnamed
snapshots are kept in the host memory of every rank. If a request needs other weights than the
engines hold, its weights are first sent to the engines, with adapters merged.
"""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import EngineError, shortened
from megatron_rl.model.seam_fields import DTYPES
from megatron_rl.rollout.build import place_engine
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, Engine, EngineLost
from megatron_rl.rollout.engines.placement import RankLocation
from megatron_rl.rollout.engines.sampling import SampledSequence, SampleRequest, SampleResult, TopLogProbs
from megatron_rl.rollout.http_connections import QUIET
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.rollout_metrics import RolloutMetrics
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.serve.models import Models, Weights
from megatron_rl.serve.naming import BASE
from megatron_rl.serve.values import Fault, RequestError, SampleFailed

log = logging.getLogger(__name__)
log.addFilter(QUIET)


class Samplers:
    """Holds weights by sampler's name, and samples with them. Every method is a collective unless it says otherwise.

    models: the models in training, from which snapshots are taken.
    """

    def __init__(self, models: Models, tokenizer) -> None:
        self.models, backend = models, models.backend
        self.config = config = backend.config
        # Start this rank's engine.
        topology = backend.topology
        location = RankLocation(
            rank=topology.rank,
            world_size=topology.world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", topology.rank)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size)),
        )
        engine, self.share, shared = place_engine(
            config,
            tokenizer,
            location=location,
            device=HOST.device,
            dtype=DTYPES[config.model.dtype],
            vocab_size=backend.shape.vocab_size,
        )
        self._weights: dict[str, Weights | None] = {BASE: None}
        self._wanted, self._sent, self._version = BASE, "", NO_WEIGHTS
        self._versions = itertools.count(1)
        # The manager of rollouts sends it weights. This object is the manager's source of weights.
        worker = RolloutWorker(
            engine,
            None,
            config.rollout.producer,
            apart=False,
            share=self.share,
            deadline_s=config.run.deadline_s,
        )
        self.manager = RolloutManager(
            worker,
            config.weight_sync,
            weights=self,
            metrics=RolloutMetrics(has_turns=False, has_delta=config.weight_sync.delta),
            models=[backend] if shared else (),
        )

    def snapshot(self, name: str, model: str) -> None:
        """Keep a copy of the current weights of ``model`` under a sampler's name."""
        self._keep(name, self.models.snapshot(model))

    def read(self, name: str, folder: pathlib.Path) -> None:
        """Read the weights of a checkpoint and keep them under a sampler's name."""
        self._keep(name, self.models.read(folder))

    def _keep(self, name: str, weights: Weights) -> None:
        self._weights[name] = weights
        if self._sent == name:
            self._sent = ""

    def has(self, name: str) -> bool:
        return name in self._weights

    def drop(self, name: str) -> None:
        """Forget a sampler's weights. Do nothing if they are not in memory."""
        self._weights.pop(name, None)

    @property
    def version(self) -> int:
        """Return the version number of the weights for the next samples. Not a collective."""
        return self._version

    def tensors(self, engine: Engine):
        """Yield (Hugging Face name, tensor) of all weights for the next samples, with adapters merged.

        engine: not read, since all engines get the same weights.
        """
        with self.models.reading(self._weights[self._wanted]) as backend:
            yield from backend.export(bucket_bytes=self.config.weight_sync.bucket_bytes // 2)

    def sample(self, name: str, requests: Sequence[SampleRequest]) -> list[SampleResult | SampleFailed]:
        """Return the requests' results, in order, on every rank.

        Each rank with an engine samples its share of the requests. If the engine cannot answer a
        request, its result is SampleFailed, and the others are answered. Raises RequestError if the
        weights are not in memory. Raises EngineError if engines are lost ``weight_sync.attempts``
        times in a row.

        name: the name of the weights.
        """
        if name not in self._weights:
            raise RequestError(f"sampler weights {name!r} are not held here", status=404, fault=Fault.SERVER)
        if self._sent != name:
            self._wanted, self._version = name, next(self._versions)
        why = ""
        for _ in range(self.config.weight_sync.attempts):
            self.manager.sync_weights()
            self._sent = name
            self.manager.device.to_engine()
            mine, lost = self._sample_share(requests)
            answers = gather_json([lost, mine])
            self.manager.device.to_trainer()
            if not any(part[0] for part in answers):
                found = {int(i): value for part in answers for i, value in part[1].items()}
                return [_from_json(found[i]) for i in range(len(requests))]
            why = next(part[0] for part in answers if part[0])
        raise EngineError(f"engines were lost {self.config.weight_sync.attempts} times in a row: {why}")

    def _sample_share(self, requests: Sequence[SampleRequest]) -> tuple[dict[str, object], str | None]:
        """Return (request's number → JSON-able result, reason) for the requests that this rank's engine samples.

        The reason says why the engine was lost; None if it was not.
        """
        if self.share is None:
            return {}, None
        number, count = self.share
        places = range(number, len(requests), count)
        try:
            results = answers_of(self.manager.engine, [requests[i] for i in places])
        except EngineLost as error:
            return {}, str(error)
        return {str(i): _to_json(result) for i, result in zip(places, results, strict=True)}, None

    def close(self) -> None:
        """End the engines. Not a collective."""
        self.manager.close()


def answers_of(engine: Engine, requests: Sequence[SampleRequest]) -> list[SampleResult | SampleFailed]:
    """Return an engine's results of requests, in order. If it fails on several requests, each is tried alone.

    A request that fails alone gets SampleFailed. Raises EngineLost if the engine has ended.
    """
    try:
        return list(engine.sample(requests))
    except EngineLost:
        raise
    except Exception as error:
        if len(requests) > 1:
            return [result for request in requests for result in answers_of(engine, [request])]
        log.warning("sampling request %s failed", requests[0].request_id, exc_info=True)
        return [SampleFailed(reason=shortened(f"{type(error).__name__}: {error}", 500))]


def _to_json(result: SampleResult | SampleFailed) -> dict[str, object]:
    if isinstance(result, SampleFailed):
        return {"failed": result.reason}
    return {
        "sequences": [
            [x.token_ids.tolist(), x.logprobs.tolist(), x.finish_reason, _top_to_json(x.top)] for x in result.sequences
        ],
        "prompt": None if result.prompt_logprobs is None else result.prompt_logprobs.tolist(),
        "prompt_top": _top_to_json(result.prompt_top),
    }


def _top_to_json(top: TopLogProbs | None) -> list | None:
    return None if top is None else [top.token_ids.tolist(), top.logprobs.tolist()]


def _from_json(value: dict) -> SampleResult | SampleFailed:
    if "failed" in value:
        return SampleFailed(reason=value["failed"])
    return SampleResult(
        sequences=[
            SampledSequence(
                token_ids=np.array(ids, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                finish_reason=reason,
                top=_top_from_json(top),
            )
            for ids, logprobs, reason, top in value["sequences"]
        ],
        prompt_logprobs=None if value["prompt"] is None else np.array(value["prompt"], dtype=np.float32),
        prompt_top=_top_from_json(value["prompt_top"]),
    )


def _top_from_json(value: list | None) -> TopLogProbs | None:
    if value is None:
        return None
    return TopLogProbs(token_ids=np.array(value[0], dtype=np.int32), logprobs=np.array(value[1], dtype=np.float32))
