"""The queue of rollouts in a checkpoint: what is finished and not trained, both buffers, lengths and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.serialization import SavedGroup, pack_groups, unpack_groups
from megatron_rl.rollout.worker import Group, RolloutJob

LEFT = "left"  # in the place of a rollout's index: the stragglers of the rollout that was taken last


def save(queue: RolloutQueue) -> tuple[dict, bytes]:
    """Return (the state that every rank holds, as JSON; this rank's own groups, as bytes) between two rollouts.

    Waits for all rollouts under way, since the weights that they come from are gone after a checkpoint. The next
    rollout that is started has the current weights. A collective.
    """
    queue.manager.settle()
    queue.resend_weights = True
    groups = {
        f"kept/{name}": SavedGroup(prompt=group.prompt, rollouts=group.rollouts, scores=group.scores)
        for name, group in queue.replay_groups.items()
    }
    for number, job in [*queue.jobs.items(), *([(LEFT, queue.left)] if queue.left else [])]:
        with job.change:  # reward workers may be changing it
            groups |= {
                f"job/{number}/{place}": SavedGroup(
                    prompt=job.prompts[place], rollouts=job.rollouts[place], scores=job.scores.get(place)
                )
                for place in job.mine
            }
    state = {
        "next_rollout": queue.next_rollout,
        "jobs": {str(number): _asked(job) for number, job in queue.jobs.items()},
        "left": _asked(queue.left) if queue.left else [],
        "lengths": queue.start_order.state(),
        "replay": queue.replay.state(),
        "reroll": queue.reroll.state(),
    }
    return state, pack_groups(groups)


def _asked(job: RolloutJob) -> list[list]:
    return [[place, prompt.prompt_id, prompt.attempt] for place, prompt in job.prompts.items()]


def restore(queue: RolloutQueue, state: Mapping, rows: Sequence[bytes]) -> None:
    """Take over the state and the groups that ``save`` returned. Not a collective.

    rows: the bytes that ``save`` returned on some of its ranks; each rank's go to exactly one rank of this run. The
        prompts' cursor must be restored before.
    """
    queue.next_rollout, queue.resend_weights = state["next_rollout"], True
    gone = queue.replay.load_state(state["replay"])
    queue.reroll.load_state(state["reroll"])
    queue.start_order.load_state(state.get("lengths", {}))  # older checkpoints have neither lengths nor stragglers
    groups = {key: group for data in rows for key, group in unpack_groups(data, queue.prompts.recall).items()}
    if asked := state.get("left"):
        queue.left = _restored_job(queue, LEFT, asked, groups)
    for number, asked in sorted((int(number), asked) for number, asked in state["jobs"].items()):
        queue.jobs[number] = _restored_job(queue, number, asked, groups)
    kept = {key.removeprefix("kept/"): group for key, group in groups.items() if key.startswith("kept/")}
    queue.replay_groups = {
        name: Group(rollouts=tuple(group.rollouts), scores=tuple(group.scores))
        for name, group in kept.items()
        if name not in gone
    }


def _restored_job(
    queue: RolloutQueue, number: int | str, asked: Sequence, groups: Mapping[str, SavedGroup]
) -> RolloutJob:
    """Start a job of the groups of a checkpoint. ``asked``: its [place, prompt id, attempt], of all ranks."""
    job = queue.manager.restored_job({place: queue.prompts.recall(*identity) for place, *identity in asked})
    for key, group in groups.items():
        kind, _, place = key.rpartition("/")
        if kind == f"job/{number}":
            job.put(int(place), group.rollouts, group.scores)
    queue.manager.start(job)
    return job
