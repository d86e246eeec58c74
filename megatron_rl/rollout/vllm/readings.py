"""A rank's readings of its vLLM engines, for the metrics endpoint."""

from __future__ import annotations

from megatron_rl.observability.prometheus.live import EngineReading
from megatron_rl.rollout.engines.replica import Replica
from megatron_rl.rollout.vllm.process_replica import ProcessReplica


def reading_of(replica: Replica, number: int, *, is_up: bool, restarts: int) -> EngineReading:
    """Return the reading of one engine.

    number: its place among the rank's engines.

    Only an engine that the rank started reports its load, with its progress
    (rollout/vllm/process_main.py).
    """
    known = {"is_up": is_up, "restarts": restarts, "weight_version": replica.weight_version}
    if not isinstance(replica, ProcessReplica):
        return EngineReading(number=number, **known)
    load, peak = replica.load, replica.peak
    return EngineReading(
        number=None,
        **known,
        running=load.running,
        waiting=load.waiting,
        kv_cache_usage=load.kv_cache_usage,
        most_running=peak.running,
        most_waiting=peak.waiting,
        most_kv_cache_usage=peak.kv_cache_usage,
    )
