"""Advice for an engine that was lost because its memory did not suffice."""

from __future__ import annotations

MEMORY_WORDS = ("out of memory", "allocate memory", "exit code -9", "bad_alloc", "MemoryError") + (
    "could not create a primitive",  # oneDNN's on a CPU, for a kernel that found no memory for itself
)


def with_memory_advice(why: str) -> str:
    """Return an engine's words, with the settings that lower its memory added where they speak of memory."""
    if any(word in why for word in MEMORY_WORDS):
        return (
            f"{why}\nThis looks like too little memory: lower rollout.gpu_memory_utilization, "
            "rollout.max_requests or rollout.vllm.max_num_seqs"
        )
    return why
