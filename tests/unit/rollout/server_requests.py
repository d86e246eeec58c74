"""Replicas and requests of the tests of servers."""

from megatron_rl.rollout.engines.replica import GenerateRequest
from megatron_rl.rollout.vllm.server_replica import ServerReplica
from tests.patience import HANG_S, patient

BOUND_S, LONG_S = patient(HANG_S), patient(10 * HANG_S)  # the second is a deadline that nothing here reaches
SHORT_S = 0.2  # a deadline for servers that hang: no other server is asked with it
VERSION, OUT_OF_MEMORY = 3, "CUDA out of memory. Tried to allocate 2.00 GiB"


def replica_of(url: str, **changes) -> ServerReplica:
    replica = ServerReplica(url, **changes)
    replica.weight_version = VERSION
    return replica


def request_of(name: str = "q", n: int = 2) -> GenerateRequest:
    given = {"max_tokens": 8, "temperature": 0.7, "seed": 11, "stop_token_ids": (9,)}
    return GenerateRequest(request_id=name, token_ids=(5, 6), n=n, **given)
