"""Functions that save a queue of rollouts for a checkpoint, and restore it: its untrained groups and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.rollout.groups.build import with_stragglers
from megatron_rl.rollout.groups.serialization import SavedGroup, pack_groups, unpack_groups, unpack_history
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.worker import Group, RolloutJob

LEFT = "left"  # stands instead of a rollout's index for the stragglers of the latest taken rollout


def save(queue: RolloutQueue) -> tuple[dict, bytes]:
    """Return the queue's state for a checkpoint between two rollouts. A collective.

    Two values are returned. The first is the state that every rank holds, as JSON-able values. The
    second is this rank's own groups, as bytes.

    The call first waits until no rollout is being generated. A rollout's weights may be older than
    the checkpoint's, and a run that resumes has only the checkpoint's. The next rollout, here or
    after a resume, is started with the current weights.
    """
    queue.manager.settle()
    queue.resend_weights = True
    parts = queue.parts
    groups = {
        f"kept/{name}": SavedGroup(prompt=group.prompt, rollouts=group.rollouts, scores=group.scores)
        for name, group in parts.replay.groups.items()
    }
    left = parts.hand_out.left
    for number, job in [*queue.jobs.items(), *([(LEFT, left)] if left else [])]:
        with job.change:  # reward workers may be changing it
            groups |= {
                f"job/{number}/{place}": SavedGroup(
                    prompt=job.prompts[place], rollouts=job.rollouts[place], scores=job.scores.get(place)
                )
                for place in job.mine
            }
    state = {
        "next_rollout": queue.next_rollout,
        "jobs": {str(number): _identities(job) for number, job in queue.jobs.items()},
        "left": _identities(left) if left else [],
        "lengths": parts.order.state(),
        "replay": parts.replay.state(),
        "reroll": parts.reroll.state(),
    }
    history = queue.manager.history
    return state, pack_groups(groups, history.state() if history is not None else {})


def _identities(job: RolloutJob) -> list[list]:
    """Return [number, prompt id, attempt] for each group of a job, groups of other ranks included.

    The number is the group's in the rollout. The attempt counts earlier answers to the prompt.
    """
    return [[place, prompt.prompt_id, prompt.attempt] for place, prompt in job.prompts.items()]


def restore(queue: RolloutQueue, state: Mapping, rows: Sequence[bytes]) -> None:
    """Restore the state and the groups that ``save`` returned. Not a collective.

    rows: the groups that this rank restores; each element is the bytes that ``save`` returned on
        one saving rank. Every saving rank's bytes go to exactly one rank of this run.

    The position in the prompt dataset must be restored before this call.
    """
    queue.next_rollout, queue.resend_weights = state["next_rollout"], True
    queue.parts.reroll.load_state(state["reroll"])
    queue.parts.order.load_state(state.get("lengths", {}))  # older checkpoints have neither lengths nor stragglers
    groups = {key: group for data in rows for key, group in unpack_groups(data, queue.prompts.recall).items()}
    if (history := queue.manager.history) is not None:
        history.load_state(*map(unpack_history, rows))
    if identities := state.get("left"):
        per_rollout = queue.settings.train.prompts_per_rollout
        queue.parts = with_stragglers(queue.parts, queue.manager, queue.timer, prompts_per_rollout=per_rollout)
        queue.parts.hand_out.left = _restored_job(queue, LEFT, identities, groups)
    for number, identities in sorted((int(number), saved) for number, saved in state["jobs"].items()):
        queue.jobs[number] = _restored_job(queue, number, identities, groups)
    replayed = {
        key.removeprefix("kept/"): Group(rollouts=tuple(group.rollouts), scores=tuple(group.scores))
        for key, group in groups.items()
        if key.startswith("kept/")
    }
    queue.parts.replay.load_state(state["replay"], replayed)


def _restored_job(
    queue: RolloutQueue, number: int | str, identities: Sequence, groups: Mapping[str, SavedGroup]
) -> RolloutJob:
    """Start the job of a rollout that a checkpoint holds, with its finished groups; return the job.

    number: the rollout's index, or LEFT for the stragglers of the latest trained rollout.
    identities: the list that ``_identities`` returned for the job.
    groups: name in the checkpoint → finished group, for the groups that this rank reads.
    """
    prompts = {place: queue.prompts.recall(*identity) for place, *identity in identities}
    job = RolloutJob(prompts, (), queue.settings.samples_per_prompt)
    for key, group in groups.items():
        kind, _, suffix = key.rpartition("/")
        if kind == f"job/{number}":
            job.put(int(suffix), group.rollouts, group.scores)
    queue.manager.start(job)
    return job
