"""The function that reads the state of one vLLM engine for the metrics endpoint."""

from __future__ import annotations

from megatron_rl.observability.prometheus.live import EngineReading
from megatron_rl.rollout.engines.replica import Replica
from megatron_rl.rollout.vllm.process_replica import ProcessReplica


def reading_of(replica: Replica, number: int, *, is_up: bool, restarts: int) -> EngineReading:
    """Return the current state of one engine: whether it serves, its restarts, its weight version and its load.

    number: the engine's index among the rank's engines.
    is_up: whether the engine serves.
    restarts: how often the engine was started again, or served again after a loss.

    A server's load is None. Only an engine that the rank started reports its load, in its messages
    of progress (rollout/vllm/process_main.py).
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
