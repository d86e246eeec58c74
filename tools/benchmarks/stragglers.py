"""Measures rollouts of heavy-tailed lengths with and without stragglers that go on (docs/rollout-lengths.md).

    python tools/benchmarks/stragglers.py                # under an environment with vLLM; all samples at once
    python tools/benchmarks/stragglers.py --slots 8      # an engine that holds fewer than a rollout has
    python tools/benchmarks/stragglers.py --engine counted    # no engine: decoding steps are counted

Rollouts are made ahead by RolloutManager, as a run makes them, with weights sent in flight before each; in the place of
training, which has a device of its own, the main thread sleeps. Lengths are drawn as tools/benchmarks/start_order.py
draws them. For each ``rollout.producer.straggler_share`` the same groups are generated, all of them to their end, in
turn within each round; the bound are rollouts of as many tokens that are dealt out evenly. Counted: each decoding step
gives every running sample one token, and training takes no time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
EVENLY = "evenly dealt"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/stragglers.py --slots 8 --json runs/benchmark_stragglers.json",
    )
    parser.add_argument("--engine", choices=["vllm", "counted"], default="vllm")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.125, 0.25], metavar="SHARE")
    parser.add_argument("--prompts", type=int, default=64, help="of a rollout, one sample each")
    parser.add_argument("--slots", type=int, default=64, help="samples that the engine holds at once")
    parser.add_argument("--median-tokens", type=float, default=30.0)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm")
    parser.add_argument("--most-tokens", type=int, default=300)
    parser.add_argument("--train-s", type=float, default=0.1, help="seconds of training after each rollout")
    parser.add_argument("--rollouts", type=int, default=6, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="each of lengths of its own")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("prompts", "slots", "most_tokens", "rollouts", "rounds"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    if 0.0 not in given.shares:
        parser.error("--shares must name 0, which the others are compared with")
    return given


class GivenLengths:
    """Has an engine give every sample of a prompt the length that is asked for."""

    def __init__(self, engine, lengths: Sequence[int]) -> None:
        self._engine, self._lengths = engine, lengths

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def generate(self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None):
        lengths = [int(self._lengths[int(prompt.prompt_id.partition("@")[0])]) for prompt in prompts]
        found = self._engine.generate(
            prompts, samples_per_prompt, temperature=temperature, max_tokens=lengths, on_finished=on_finished
        )
        if [len(rollout.response_ids) for rollout in found[::samples_per_prompt]] != lengths:
            raise RuntimeError("a sample has not the length that was asked for")
        return found


def make_manager(engine, config, weights: dict, version: Callable[[], int]):
    """Return the rollout manager of a run of one rank, whose every sample is worth 1."""
    from megatron_rl.rollout.manager import RolloutManager
    from megatron_rl.types import Score

    return RolloutManager(
        engine,
        lambda rollouts: [Score(total=1.0, by_function=()) for _ in rollouts],
        config,
        export=lambda: iter(weights.items()),
        version=version,
        share=(0, 1),
    )


def time_rollouts(given: argparse.Namespace, engine, config, weights: dict, lengths, versions: Iterator[int]) -> float:
    """Return the seconds of a rollout, of ``given.rollouts`` that are made ahead and trained one after the other."""
    from megatron_rl.rollout.stragglers import num_to_start, num_to_train
    from megatron_rl.types import Prompt

    random, now = np.random.default_rng(0), [next(versions)]
    prompts = (
        Prompt(prompt_id=f"{i}@0", text="", token_ids=tuple(random.integers(5, 15, size=8).tolist()), columns={})
        for i in itertools.count()
    )
    manager = make_manager(GivenLengths(engine, lengths), config, weights, lambda: now[0])
    stragglers, jobs, left, trained = config.rollout.producer.num_stragglers(given.prompts), {}, None, 0

    def start(index: int) -> None:
        count = num_to_start(
            prompts_per_rollout=given.prompts,
            stragglers=stragglers,
            rollouts=index - min(jobs, default=index) + 1,
            outstanding=sum(len(job.prompts) for job in [*jobs.values(), *([left] if left else [])]),
            is_last=index == given.rollouts - 1,
        )
        jobs[index] = manager.job(dict(enumerate(itertools.islice(prompts, count))), 1)
        manager.start(jobs[index])

    manager.sync_weights()
    started = time.perf_counter()
    for index in range(given.rollouts):
        for ahead in range(len(jobs) + index, min(index + 2, given.rollouts)):
            start(ahead)
        job = jobs.pop(index)
        if stragglers:
            room = num_to_train(
                prompts_per_rollout=given.prompts, left=len(left.prompts) if left else 0, started=len(job.prompts)
            )
            whole, _ = manager.collect_most(job, left, room)
            left = job if job.prompts else None
        else:
            whole, left = job, None
            manager.collect(job, sorted(job.prompts))
        manager.finish(whole)
        trained += len(whole.prompts)
        time.sleep(given.train_s)
        now[0] = next(versions)
        manager.sync_weights()
    seconds = (time.perf_counter() - started) / given.rollouts
    manager.worker.close()
    if left is not None or trained != given.prompts * given.rollouts:
        raise RuntimeError(f"{trained} groups of {given.prompts * given.rollouts} were trained")
    return seconds


def count_steps(lengths: Sequence[int], share: float, prompts: int, slots: int, rollouts: int) -> int:
    """Return the decoding steps of rollouts that are made ahead, as rollout/queue.py and rollout/worker.py start them.

    A rollout's groups are started once it may be made ahead of the one that is waited for, and the one before lacks no
    more than its stragglers.
    """
    from megatron_rl.rollout.stragglers import num_to_start, num_to_train

    stragglers, steps, drawn, started, taken, left = int(share * prompts + 1e-9), 0, 0, 0, 0, 0
    owed: list[set[int]] = []  # each rollout's samples that are not whole
    own: list[int] = []  # and how many of its own are not taken
    waiting: list[int] = []
    running: dict[int, int] = {}
    while taken < rollouts:
        while started < min(taken + 2, rollouts) and (
            not started or len(owed[-1]) <= (max(1, stragglers) if share else 0)
        ):
            count = num_to_start(
                prompts_per_rollout=prompts,
                stragglers=stragglers,
                rollouts=started - taken + 1,
                outstanding=left + sum(own[taken:]),
                is_last=started == rollouts - 1,
            )
            owed.append(set(range(drawn, drawn + count)))
            own.append(count)
            waiting += range(drawn, drawn + count)
            drawn, started = drawn + count, started + 1
        while waiting and len(running) < slots:
            sample = waiting.pop(0)
            running[sample] = int(lengths[sample])
        least = min(running.values())
        steps, running = steps + least, {x: n - least for x, n in running.items()}
        ended = {x for x, n in running.items() if not n}
        running = {x: n for x, n in running.items() if n}
        for samples in owed:
            samples -= ended
        while taken < started:
            room = num_to_train(prompts_per_rollout=prompts, left=left, started=own[taken]) - left
            if (taken and owed[taken - 1]) or own[taken] - len(owed[taken]) < room:
                break
            taken, left = taken + 1, own[taken] - room
            own[taken - 1] = 0
    return steps


def measure_counted(given: argparse.Namespace) -> list[dict]:
    found: dict[str, list[float]] = {}
    for turn in range(given.rounds):
        lengths, evenly = draw(given, turn)
        for name, share, wanted in in_turn(given, lengths, evenly):
            steps = count_steps(wanted, share, given.prompts, given.slots, given.rollouts)
            found.setdefault(name, []).append(steps / given.rollouts)
    return table(found, "steps")


def draw(given: argparse.Namespace, turn: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of a round's groups, and as many tokens dealt out evenly."""
    from start_order import draw_lengths

    number = given.prompts * given.rollouts
    drawn = argparse.Namespace(**(vars(given) | {"prompts": number, "epoch_sigma": 0.0}))
    lengths, *_ = draw_lengths(drawn, np.random.default_rng(turn))
    even, rest = divmod(int(lengths.sum()), number)
    return lengths, np.array([even + 1] * rest + [even] * (number - rest))


def in_turn(given: argparse.Namespace, lengths: np.ndarray, evenly: np.ndarray) -> Iterator[tuple]:
    """Yield name, share and lengths of what a round compares."""
    yield EVENLY, 0.0, evenly
    for share in given.shares:
        yield f"{share:g}", share, lengths


def table(found: dict[str, list[float]], unit: str) -> list[dict]:
    return [
        {
            "share": name,
            unit: statistics.median(values),
            "of_the_bound": statistics.median(a / b for a, b in zip(values, found[EVENLY], strict=True)),
        }
        for name, values in found.items()
    ]


def measure(given: argparse.Namespace, folder: pathlib.Path) -> list[dict]:
    from start_order import open_engine

    settings = ["rollout.producer.mode=prefetch", "weight_sync.in_flight=true", "correction.mode=token_truncate"]
    engine, config, weights = open_engine(given, folder, *settings)
    versions, seconds = itertools.count(1), {}
    try:
        warm_up = argparse.Namespace(**(vars(given) | {"rollouts": 1}))
        time_rollouts(warm_up, engine, config, weights, np.full(given.prompts, 16), versions)
        for turn in range(given.rounds):
            for name, share, wanted in in_turn(given, *draw(given, turn)):
                found = time_rollouts(given, engine, with_share(config, share), weights, wanted, versions)
                print(f"round {turn}: {name}: {found:.2f} s a rollout", file=sys.stderr, flush=True)
                seconds.setdefault(name, []).append(found)
    finally:
        engine.close()
    return table(seconds, "seconds")


def with_share(config, share: float):
    from dataclasses import replace

    producer = replace(config.rollout.producer, straggler_share=share)
    return replace(config, rollout=replace(config.rollout, producer=producer))


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.engine == "counted":
        rows = measure_counted(given)
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(given, pathlib.Path(folder))
        dist.destroy_process_group()
    unit = "steps" if given.engine == "counted" else "seconds"
    for row in rows:
        print(f"{row['share']:<16}{row[unit]:10.2f} {unit} a rollout {row['of_the_bound']:6.3f} of the bound")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps({"given": {k: str(v) for k, v in vars(given).items()}, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
