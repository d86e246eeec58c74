"""The forecast of an update: the trainer's planner plans it, and planning/timeline.py predicts its time.

An update is the optimizer steps on one rollout. Two updates are planned: "dense" with all samples,
and "skip" without the samples whose advantage is 0. The forecast has the time, pipeline bubbles and
load balance of both updates, the memory, and what limits the speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.sharing import shares_prompts
from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.config import Config
from megatron_rl.planning.plan import PlanRules, plan_rules, plan_steps
from megatron_rl.planning.timeline import Timeline, simulate
from megatron_rl.planning.tokens import SampleTokens
from megatron_rl.simulator.degrees import Degrees, degrees_of
from megatron_rl.simulator.machine import Costs
from megatron_rl.simulator.memory import StageMemory, beside_critic, beside_teacher, stage_memory
from megatron_rl.simulator.placed import PlacedModel
from megatron_rl.simulator.workload import Workload
from megatron_rl.types import BatchPlan, StepKind, StepPlan
from megatron_rl.validate.critic import critic_config, teacher_config
from megatron_rl.weights.model_shape import ModelShape

ReadShape = Callable[..., ModelShape]
"""The type of ``read_shape`` (simulator/command.py), which returns the shape of a configuration's model."""
MAX_OPERATIONS = 400_000  # per mini-batch; above, the clock runs only for the busiest data-parallel ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Holds the pipeline that the picture shows: a mini-batch on its slowest data-parallel rank.

    It is the first mini-batch of which not all samples are dropped. M is the number of its
    micro-batches on that rank.

    rank: the data-parallel rank.
    timeline: when each pass of that pipeline begins and ends.
    dead: [M] float, the share of each micro-batch's tokens whose samples have no signal (advantage
        0).
    filler: [M] bool, True for a filler micro-batch, one of weight zero.
    """

    rank: int
    timeline: Timeline
    dead: np.ndarray
    filler: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Holds the predicted seconds and counts of a rollout's update, over all its optimizer steps.

    plan: the plan that was timed.
    pipeline_s: the seconds of the forward and backward passes.
    busiest_s: the part of ``pipeline_s`` in which the busiest pipeline stage of the slowest
        data-parallel replica computes.
    mean_s: the mean over that replica's pipeline stages of the seconds in which a stage computes.
    optimizer_s: the seconds of reduction, norm, AdamW and gather.
    bubble_share: [P], the share of ``pipeline_s`` in which each stage of the slowest replica waits.
    imbalance: the busiest replica's seconds of work over the mean of all replicas, less 1.
    microbatches: (fewest, most) micro-batches of a replica in one mini-batch.
    largest_tokens: the number of tokens, pads included, of the largest micro-batch.
    tokens: the number of tokens that run, without pads.
    drawn: the mini-batch in the picture; None if nothing runs.
    """

    plan: BatchPlan
    pipeline_s: float
    busiest_s: float
    mean_s: float
    optimizer_s: float
    bubble_share: np.ndarray
    imbalance: float
    microbatches: tuple[int, int]
    largest_tokens: int
    tokens: int
    drawn: Drawn | None

    @property
    def update_s(self) -> float:
        return self.pipeline_s + self.optimizer_s

    def count(self, name: str) -> int:
        """Return a count over all mini-batches.

        name: ``num_fillers``, micro-batches without a loss, added so that ranks run equally many;
            ``silent_ranks``, ranks that run no micro-batch; or ``ghosts``, mini-batches without
            signal.
        """
        if name == "ghosts":
            return sum(x.kind is StepKind.GHOST for x in self.plan.mini_batches)
        return sum({"num_fillers": x.num_fillers, "silent_ranks": x.silent_ranks}[name] for x in self.plan.mini_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Names a limit that makes the update slower, and the seconds that the update would save without it.

    note: a remark on the limit for the printed table.
    """

    name: str
    saves_s: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """Holds the predicted update of all samples (dense) and of samples with signal alone (skip).

    dense, skip: the two updates. A sample without signal has an advantage of 0, and the skip drops
        it.
    ideal: the gain if time were proportional to tokens, which is all tokens over the tokens of
        samples with signal. None if no sample has signal.
    gain: the dense update's predicted time over the skip update's.
    memory: the memory of each pipeline stage in the dense update.
    constraints: the limits without which the skip update would take less time, such as the pipeline
        bubble; the one that costs the most time first.
    dead_samples: the share of samples without signal.
    costs: the costs from which the seconds were computed.
    """

    dense: Outcome
    skip: Outcome
    ideal: float | None
    gain: float
    memory: tuple[StageMemory, ...]
    constraints: tuple[Constraint, ...]
    dead_samples: float
    costs: Costs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """Holds the inputs of one forecast.

    config: the configuration, with a dtype in place of ``model.dtype=auto``
        (weights/model_dtype.py).
    shape: the shape of the policy.
    workload: the samples of the update.
    costs: the costs from which seconds are computed.
    critic: the same inputs for PPO's critic, with its own degrees of parallelism; None without a
        critic.
    teacher: the shape of a teacher whose weights lie beside the policy's on each GPU; None without
        one.
    """

    config: Config
    shape: ModelShape
    degrees: Degrees
    workload: Workload
    costs: Costs
    critic: Job | None = None
    teacher: ModelShape | None = None

    @property
    def placed(self) -> PlacedModel:
        return PlacedModel.of(self.config, self.shape, self.degrees)

    def rules(self) -> PlanRules:
        """Return the planner's rules, as the trainer's backend would set them.

        The rules contain the costs by which micro-batches are planned: ``costs.model`` if a run has
        measured it and ``plan.calibrate`` is on, else the planner's assumed costs.
        """
        config = self.config
        shares = shares_prompts(config.plan, config.parallel, config.megatron, self.shape.layer_spec)
        rules = plan_rules(
            config.plan,
            self.degrees,
            self.shape,
            sequence_parallel=config.parallel.sequence_parallel,
            fp8=bool(config.megatron.transformer.get("fp8")),
            share_prompts=shares,
        )
        calibrated = self.costs.from_run and self.config.plan.calibrate
        return dataclasses.replace(rules, cost=self.costs.model) if calibrated else rules

    def signal(self) -> np.ndarray:
        """Return [S] bool, True for a sample with signal: it has a loss token, and an advantage that is not 0.

        In two cases a loss token is enough: in a supervised step, and if the advantage does not follow
        from rewards alone (with a critic, a teacher, or a KL penalty in the reward).
        """
        config, workload = self.config, self.workload
        if workload.supervised or config.has_critic or config.has_teacher or config.kl_in_reward:
            return workload.loss_tokens > 0
        return workload.signal(config.advantage, config.reward, epsilon=signal_rule(config).advantage_epsilon)

    def plan(self, rules: PlanRules, signal: np.ndarray, *, drops: bool) -> BatchPlan:
        """Return the plan that MegatronBackend.plan_training would make of the samples.

        signal: [S] bool, True for a sample with signal (an advantage other than 0).
        drops: whether samples without signal are dropped.
        """
        config = self.config
        members = self.workload.mini_batches(config.train, merge=config.skip.steps == "merge" and drops)
        return plan_steps("train", members, self._tokens(rules), signal, rules, drops=drops)

    def padded(self, rules: PlanRules) -> SampleTokens:
        """Return the number of tokens of each sample, padded as ``rules`` demand."""
        return self._tokens(rules).padded(rules.pad_multiple)

    def _tokens(self, rules: PlanRules) -> SampleTokens:
        return self.workload.tokens(share_prompts=rules.share_prompts, windows=self.shape.windows)


def forecast(job: Job) -> Forecast:
    """Return the forecast of a job; raise ConfigError if the planner or the configuration refuses it."""
    rules, signal = job.rules(), job.signal()
    drops = signal_rule(job.config).drops
    dense = run_plan(job, rules, signal, drops=False)
    skip = run_plan(job, rules, signal, drops=drops)
    lengths = job.workload.lengths
    survivors = int(lengths[signal].sum()) if drops else int(lengths.sum())
    return Forecast(
        dense=dense,
        skip=skip,
        ideal=int(lengths.sum()) / survivors if survivors else None,
        gain=dense.update_s / skip.update_s if skip.update_s else 1.0,
        memory=memory_of(job, dense.plan),
        costs=job.costs,
        constraints=_constraints(job, rules, signal, skip, drops=drops),
        dead_samples=float((~signal).mean()),
    )


def with_critic(job: Job, read_shape: ReadShape) -> Job:
    """Return the job with the inputs for its critic, if it has one; of the critic only the memory is forecast.

    read_shape: a function that returns the shape of a configuration's model (simulator/command.py).

    Raises ConfigError if the critic's degrees of parallelism do not divide its ranks or its model.
    """
    if not job.config.has_critic:
        return job
    config = critic_config(job.config)
    degrees = degrees_of(config.parallel, job.config.critic.ranks or job.degrees.world_size)
    shape = read_shape(config, degrees, value_head=True)
    costs = dataclasses.replace(job.costs, from_run=False)
    critic = Job(config=config, shape=shape, degrees=degrees, workload=job.workload, costs=costs)
    return dataclasses.replace(job, critic=critic)


def with_teacher(job: Job, read_shape: ReadShape) -> Job:
    """Return the job with the shape of its teacher, if its ranks hold one; only the teacher's memory is forecast.

    read_shape: a function that returns the shape of a configuration's model (simulator/command.py).
    """
    path = job.config.teacher.hf_path
    if path is None:
        return job
    return dataclasses.replace(job, teacher=read_shape(teacher_config(job.config), job.degrees))


def critic_memory(critic: Job) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage of a critic, which trains on every sample with a loss token."""
    return memory_of(critic, critic.plan(critic.rules(), critic.workload.loss_tokens > 0, drops=True))


def memory_of(job: Job, plan: BatchPlan) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage of the policy under a plan.

    A teacher on these GPUs and a critic that shares them are included.
    """
    padded = job.padded(job.rules())
    real = [step for step in plan.mini_batches if step.kind is not StepKind.GHOST]
    tokens, loss_tokens = max((_largest(step, padded, job.workload.loss_tokens) for step in real), default=(0, 0))
    microbatches = max((int(step.num_microbatches.max()) for step in real), default=0)
    stages = tuple(
        stage_memory(job.placed, stage, tokens=tokens, loss_tokens=loss_tokens, microbatches=microbatches)
        for stage in range(job.degrees.pipeline_size)
    )
    if job.teacher is not None:
        stages = tuple(beside_teacher(stage, job.teacher, job.placed) for stage in stages)
    if job.critic is None or job.config.critic.placement == "separate":
        return stages
    return beside_critic(stages, critic_memory(job.critic), job.degrees.world_size)


def run_plan(job: Job, rules: PlanRules, signal: np.ndarray, *, drops: bool, plan: BatchPlan | None = None) -> Outcome:
    """Return the predicted times and counts of a job's update under a plan.

    rules: the planner's rules.
    signal: [S] bool, True for a sample with signal (an advantage other than 0).
    drops: whether samples without signal are dropped.
    plan: the result of ``job.plan`` with the same arguments, if it was made before; it does not
        depend on the job's costs.

    A step in which no sample has signal (a ghost step) counts as a whole optimizer step. In a run it
    takes less, since it needs no communication.
    """
    plan = plan or job.plan(rules, signal, drops=drops)
    own = job.workload.tokens(share_prompts=rules.share_prompts)
    # Put the mini-batches on the clock, one after the other.
    padded = job.padded(rules)
    epochs = job.workload.epochs(job.config.train)
    pipeline_s = busiest_s = mean_s = optimizer_s = 0.0
    idle, works, counts, drawn, largest = np.zeros(job.degrees.pipeline_size), [], [], None, 0
    for mini_batch in plan.mini_batches:
        optimizer_s += job.costs.optimizer_s * epochs
        if mini_batch.kind is StepKind.GHOST:
            continue
        rank, timeline, work = _slowest(job, rules, mini_batch, padded)
        pipeline_s, busiest_s = (
            pipeline_s + timeline.makespan * epochs,
            busiest_s + float(timeline.busy_s.max()) * epochs,
        )
        mean_s += float(timeline.busy_s.mean()) * epochs
        idle += timeline.bubble_share * timeline.makespan * epochs
        works.append(work.max() / work.mean() - 1)
        counts += mini_batch.num_microbatches.tolist()
        largest = max(largest, int(padded.sums(mini_batch.order, mini_batch.microbatch_offsets)[0].max()))
        if drawn is None:
            drawn = _drawn(rank, timeline, mini_batch, job.workload.lengths, signal)
    return Outcome(
        plan=plan,
        pipeline_s=pipeline_s,
        busiest_s=busiest_s,
        mean_s=mean_s,
        optimizer_s=optimizer_s,
        bubble_share=idle / pipeline_s if pipeline_s else idle,
        imbalance=float(np.mean(works)) if works else 0.0,
        microbatches=(min(counts, default=0), max(counts, default=0)),
        largest_tokens=largest,
        tokens=int(sum(own.sums(x.order, x.microbatch_offsets)[0].sum() for x in plan.mini_batches)) * epochs,
        drawn=drawn,
    )


def _sums(mini_batch: StepPlan, values: np.ndarray) -> np.ndarray:
    """Return [M], the sum of ``values`` over the samples of each micro-batch.

    values: [S]. No micro-batch may be empty.
    """
    return np.add.reduceat(values[mini_batch.order], mini_batch.microbatch_offsets[:-1])


def _largest(mini_batch: StepPlan, padded: SampleTokens, loss_tokens: np.ndarray) -> tuple[int, int]:
    tokens, _ = padded.sums(mini_batch.order, mini_batch.microbatch_offsets)
    return int(tokens.max()), int(_sums(mini_batch, loss_tokens)[tokens.argmax()])


def _slowest(
    job: Job, rules: PlanRules, mini_batch: StepPlan, padded: SampleTokens
) -> tuple[int, Timeline, np.ndarray]:
    """Return (the data-parallel rank whose pipeline ends last, its timeline, [D] each rank's seconds of work).

    D is the number of data-parallel ranks. A rank's work is the time in which its busiest pipeline
    stage computes. Ranks that share experts wait for one another in every layer. So the m-th
    micro-batches of these ranks all take as long as the longest of them.

    padded: the number of tokens of each sample, with pads.
    """
    # Each rank's own work, which names the busiest rank of every block in lockstep.
    forward_s, backward_s = job.costs.chunk_seconds(*padded.sums(mini_batch.order, mini_batch.microbatch_offsets))
    starts, pipeline = mini_batch.rank_offsets, job.degrees.pipeline_size
    spent = (forward_s + backward_s).reshape(-1, pipeline, forward_s.shape[1]).sum(0)
    cumulated = np.concatenate([np.zeros((pipeline, 1)), np.cumsum(spent, axis=1)], axis=1)
    work = np.diff(cumulated[:, starts], axis=1).max(0)
    block = rules.lockstep_ranks
    leaders = np.array(
        [first + int(work[first : first + block].argmax()) for first in range(0, rules.data_size, block)]
    )
    if 2 * forward_s.size > MAX_OPERATIONS:
        few = max(1, MAX_OPERATIONS * len(leaders) // (2 * forward_s.size))
        leaders = leaders[np.argsort(-work[leaders], kind="stable")[:few]]
    # The timeline of each block, and the one that ends last.
    best: tuple[int, Timeline] | None = None
    for leader in leaders.tolist():
        first = leader // block * block
        ranks = [slice(starts[r], starts[r + 1]) for r in range(first, first + block)]
        f, b = (np.max([x[:, r] for r in ranks], axis=0) for x in (forward_s, backward_s))
        timeline = simulate(*_whole_groups(f, b, job.degrees), pipeline=pipeline)
        if best is None or timeline.makespan > best[1].makespan:
            best = (leader, timeline)
    return (*best, work)


def _whole_groups(forward_s: np.ndarray, backward_s: np.ndarray, degrees: Degrees) -> tuple[np.ndarray, np.ndarray]:
    """Return (forward_s, backward_s) with micro-batches of 0 s added, up to a multiple of the pipeline's size.

    Only the interleaved schedule (several model chunks per rank) needs that multiple; without it
    nothing is added.

    forward_s, backward_s: [chunks, M], the seconds of each micro-batch in each model chunk.
    """
    short = -forward_s.shape[1] % degrees.pipeline_size if degrees.virtual_size > 1 else 0
    return tuple(np.pad(x, ((0, 0), (0, short))) for x in (forward_s, backward_s))


def _drawn(rank: int, timeline: Timeline, mini_batch: StepPlan, lengths: np.ndarray, signal: np.ndarray) -> Drawn:
    own = slice(mini_batch.rank_offsets[rank], mini_batch.rank_offsets[rank + 1])
    dead = _sums(mini_batch, np.where(signal, 0, lengths)) / _sums(mini_batch, lengths)
    filler = mini_batch.filler_microbatches
    return Drawn(rank=rank, timeline=timeline, dead=np.where(filler, 0.0, dead)[own], filler=filler[own])


def _constraints(
    job: Job, rules: PlanRules, signal: np.ndarray, skip: Outcome, *, drops: bool
) -> tuple[Constraint, ...]:
    """Return the limits that cost an update time, such as the pipeline bubble, the most costly first.

    The time that a limit costs follows from the times in ``skip``, or from planning and timing the
    samples again without that limit, or with twice the token limit.

    drops: whether the update drops samples without signal.
    skip: the predicted times and counts of the update, made with the same ``drops``.
    """
    epochs_s, longest = skip.update_s, int(job.padded(rules).whole.max(initial=0))

    def saved(**changed) -> float:
        return epochs_s - run_plan(job, dataclasses.replace(rules, **changed), signal, drops=drops).update_s

    # Limits that the outcome itself shows.
    bubble, uneven = skip.pipeline_s - skip.busiest_s, skip.busiest_s - skip.mean_s
    balance = skip.busiest_s * (1 - 1 / (1 + skip.imbalance))
    constraints = [
        Constraint(
            name="longest sample",
            saves_s=balance,
            note=f"{longest} tokens; what perfect balance over replicas would save",
        ),
        Constraint(name="optimizer step", saves_s=skip.optimizer_s, note="reduction, norm, AdamW, gather"),
    ]
    if job.degrees.pipeline_size > 1:
        note = "the busiest stage waits: the pipeline fills, drains, and stalls behind long micro-batches"
        constraints.append(Constraint(name="pipeline bubble", saves_s=bubble, note=note))
        constraints.append(
            Constraint(name="uneven stages", saves_s=uneven, note="the busiest stage over the mean of all")
        )
    # Limits that show only against a plan without the rule.
    if rules.samples_per_microbatch is None:
        more = saved(max_tokens=2 * rules.max_tokens)
        constraints.append(
            Constraint(name="token cap", saves_s=more, note=f"{rules.max_tokens} tokens; what twice as many would save")
        )
    if rules.microbatch_multiple > 1:
        note = f"micro-batches in multiples of {rules.microbatch_multiple}"
        constraints.append(Constraint(name="VPP multiple", saves_s=saved(microbatch_multiple=1), note=note))
    if rules.lockstep_ranks > 1:
        note = f"{rules.lockstep_ranks} replicas run equally many and wait for each other's longest"
        constraints.append(Constraint(name="EP lockstep", saves_s=saved(lockstep_ranks=1), note=note))
    return tuple(sorted(constraints, key=lambda c: -c.saves_s))
