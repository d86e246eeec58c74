"""Kill a run at random moments and start it again by the same command.

    python -m tests.faults.kill_study --kills 30 --out table.md

Two gloo processes on this host train a two-layer model by the command line; with --layout prefetch or streaming
rollouts are generated ahead, over an epoch of a small file. One run goes to its end; then every kill has a run of its
own: SIGKILL to rank 0, rank 1 or both (by the seed), at a moment that is uniform in wall time between the first line of
``train.main`` and the end of the uninterrupted run; the same command again, to its end. Compared with the uninterrupted
run, to the bit: the exported weights, every tensor of the last checkpoint (AdamW's too), its state and its rows, the
metrics but for clocks, and trace.jsonl, which names the prompts of each rollout.

The ranks (phased_rank.py) note their phase in a mapped file, and sleep in phases that take no time at this size, so
that kills fall in all of them; a thread that generates sleeps before each group. They are processes of their own,
forked from one that has imported everything. With --least N the first seed from --seed on is taken whose moments fall
at least N times into each phase of the uninterrupted run.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

from megatron_rl import cli
from megatron_rl.checkpoint.folder import name_of, whole_checkpoints
from megatron_rl.checkpoint.run_state import own_file
from tests.equality.saved_steps import tensors_of
from tests.faults import phased_rank
from tests.faults.phased_rank import STAGES, Note, read_note
from tests.patience import patient, until
from tests.runs.command import ADAPTIVE, DEADLINE_S, ROOT, rows_of, same_tensors, timeless, weights_of
from tests.workers.inputs import prepare_inputs
from tests.workers.nursery import Nursery, Ranks

WORLD = 2  # ranks of a run
BOUND_S = patient(600.0)  # of one attempt, its imports included
NOTED_RANK = "tests.faults.kill_study:noted_rank"
EPOCH = 40  # prompts
SAME_STATE = ("rollouts", "backend", "prompts", "feed", "trace_rollouts")
GROUP_S = 0.5  # at most, before each group of a rollout that a thread generates
SHARDED = ("parallel.pipeline=1", "optimizer.distributed=true")
SCHEDULED = ("train.num_rollouts=8", "reward.functions=[tests.faults.phased_rank:even_is_silent]")
AHEAD = (
    "train.num_rollouts=null", "train.epochs=1", "train.samples_per_mini_batch=16", "rollout.producer.min_groups=3",
    *SHARDED,
)
LAYOUTS = {
    "DP2-sharded": (*SCHEDULED, *SHARDED),
    "PP2": (*SCHEDULED, "parallel.pipeline=2"),
    "DP2-KL": (*SCHEDULED, *SHARDED, *ADAPTIVE),
    "PP2-KL-device": (*SCHEDULED, "parallel.pipeline=2", *ADAPTIVE, "reference.placement=device"),
    "prefetch": (*AHEAD, SCHEDULED[1], "rollout.producer.mode=prefetch", "rollout.producer.prefetch_rollouts=2"),
    "streaming": (
        *AHEAD, "rollout.producer.mode=streaming", "rollout.producer.prefetch_rollouts=1", "reward.num_workers=1",
        "reward.functions=[tests.reward_functions:mostly_dead]", "replay.capacity_groups=6", "replay.max_uses=2",
        "reroll.max_groups=2", "reroll.start_fraction=0.25",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill of the study: at ``seconds`` since the run began, SIGKILL to the process of each of ``ranks``."""

    seconds: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one kill.

    phase, ahead, writing: what the killed rank noted last (the lowest, where all were); ahead: a thread was generating.
    resumed: the checkpoint that the second start found. codes: the exit codes of the killed run. differs: what is not
    as in the uninterrupted run.
    """

    kill: Kill
    phase: str
    ahead: bool
    writing: bool
    resumed: int | None
    codes: tuple[int, ...]
    differs: tuple[str, ...]


def row_of(number: int, outcome: Outcome) -> str:
    killed = "all" if len(outcome.kill.ranks) == WORLD else f"rank {outcome.kill.ranks[0]}"
    resumed = "from the start" if outcome.resumed is None else f"rollout {outcome.resumed}"
    codes = ", ".join(str(code) for code in outcome.codes)
    result = f"DIFFERS: {', '.join(outcome.differs)}" if outcome.differs else "the same bits"
    ahead, written = ("yes" if noted else "" for noted in (outcome.ahead, outcome.writing))
    return (
        f"| {number} | {outcome.kill.seconds:.2f} | {killed} | {outcome.phase} | {ahead} | {written} | {codes} | "
        f"{resumed} | {result} |"
    )


def table(seconds: float, outcomes: Sequence[Outcome]) -> str:
    """Return a table of kills by phase, then of every kill."""
    phases = Counter(outcome.phase for outcome in outcomes)
    ahead, writing = sum(outcome.ahead for outcome in outcomes), sum(outcome.writing for outcome in outcomes)
    same = sum(not outcome.differs for outcome in outcomes)
    both = ["(any of them, a thread generating)", "(any of them, a checkpoint's files being written)"]
    columns = [*STAGES, "other", *both]
    lines = [
        f"{len(outcomes)} kills, uniform over the {seconds:.1f} s of the run; **{same} of {len(outcomes)}** ended "
        "with the same bits.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        "| " + " | ".join(str(phases[name]) for name in (*STAGES, "other")) + f" | {ahead} | {writing} |",
        "",
        "| # | at s | killed | phase | generating | files being written | exit codes | went on from | end |",
        "|---" * 9 + "|",
    ]
    return "\n".join([*lines, *(row_of(number, x) for number, x in enumerate(outcomes, start=1))]) + "\n"


def attempt(nursery: Nursery, arguments: Sequence[str], folder: pathlib.Path) -> AbstractContextManager[Ranks]:
    """Start the ranks of one run, which note their phases. arguments: the folder of notes, then the run's."""
    return nursery.ranks(WORLD, (), folder, function=NOTED_RANK, given=[list(arguments)])


def note_generation(note: Note) -> None:
    """Note when a thread generates, and let chance decide how long each group takes."""
    from megatron_rl.rollout.engines.embedded import TransformersEngine

    whole, chance = TransformersEngine.generate, random.SystemRandom()

    def noted(self, prompts, samples_per_prompt, *, temperature=None, on_finished=None):
        def finished(index, rollouts):
            time.sleep(chance.uniform(0.0, GROUP_S))
            on_finished(index, rollouts)

        if threading.current_thread() is threading.main_thread():
            return whole(self, prompts, samples_per_prompt, temperature=temperature, on_finished=on_finished)
        with note.within("generation"):
            return whole(self, prompts, samples_per_prompt, temperature=temperature, on_finished=finished)

    TransformersEngine.generate = noted


def generates(notes: pathlib.Path, rank: int) -> bool:
    return b"generation" in (notes / f"generation.{rank}").read_bytes()


def noted_rank(arguments: list[str]) -> NoReturn:
    """Run a rank in a fork, with its phases and its generation ahead noted in the folder of the first argument."""
    notes = pathlib.Path(arguments[0])
    notes.mkdir(parents=True, exist_ok=True)
    note_generation(Note(notes / f"generation.{os.environ['RANK']}"))
    cli.leave(phased_rank.main(arguments))


def arguments_of(inputs: pathlib.Path, run_dir: pathlib.Path, layout: str, *overrides: str) -> list[str]:
    """Return the arguments of a run of eight steps a rollout, half of them ghosts, with a checkpoint every second."""
    return [
        *("--config", str(ROOT / "examples" / "quickstart" / "quickstart.yaml"), "--run-dir", str(run_dir)),
        *(f"model.hf_path={inputs / 'model'}", f"data.train={inputs / 'train.jsonl'}", "metrics.progress=false"),
        *(f"run.deadline_s={DEADLINE_S:g}", "sft.steps=1", "sft.samples_per_step=16", "train.prompts_per_rollout=8"),
        *("train.samples_per_mini_batch=4", "rollout.samples_per_prompt=4", "checkpoint.save_every_rollouts=2"),
        *([f"data.train={inputs / 'epoch.jsonl'}"] if "train.epochs=1" in LAYOUTS[layout] else []), *LAYOUTS[layout],
        *overrides,
    ]


def make_inputs(folder: pathlib.Path) -> pathlib.Path:
    """Make data, tokenizer and model, as the quickstart makes them, and a file of few prompts."""
    prepare_inputs(folder, hidden=64, layers=2, heads=2, intermediate=96)
    (folder / "epoch.jsonl").write_text("\n".join((folder / "train.jsonl").read_text().splitlines()[:EPOCH]) + "\n")
    return folder


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The uninterrupted run: its folder, and rank 0's phase at equal distances from ``train.main`` to its end."""

    folder: pathlib.Path
    seconds: float
    phases: tuple[str, ...]

    def phase_at(self, second: float) -> str:
        return self.phases[min(int(second / self.seconds * len(self.phases)), len(self.phases) - 1)]


def whole_run(nursery: Nursery, inputs: pathlib.Path, folder: pathlib.Path, layout: str, *overrides: str) -> Whole:
    notes, phases = folder / "notes", []
    folder.mkdir()
    command = [str(notes), *arguments_of(inputs, folder / "run", layout, *overrides)]
    with attempt(nursery, command, folder / "ranks") as ranks:
        began = wait_for_begin(ranks, notes)
        while ranks.run() and time.monotonic() < began + BOUND_S:
            phases.append(read_note(notes, 0)[0])
            time.sleep(max(0.0, began + len(phases) * 0.01 - time.monotonic()))
        ended = time.monotonic()
        assert ranks.wait(BOUND_S) == [0] * WORLD, ranks.said()
    return Whole(folder=folder, seconds=ended - began, phases=tuple(phases))


def wait_for_begin(ranks: Ranks, notes: pathlib.Path) -> float:
    began = until(lambda: not ranks.run() or all(read_note(notes, rank) is not None for rank in range(WORLD)))
    assert began, ranks.said()
    return time.monotonic()


def draw(seed: int, kills: int, seconds: float) -> list[Kill]:
    numbers = random.Random(seed)
    moments = ((numbers.uniform(0.0, seconds), numbers.choice([(0,), (1,), (0, 1)])) for _ in range(kills))
    return [Kill(seconds=moment, ranks=ranks) for moment, ranks in moments]


def first_seed(seed: int, kills: int, whole: Whole, least: int) -> int:
    """Return the first seed from ``seed`` on whose kills fall ``least`` times into each phase of the whole run."""
    for tried in range(seed, seed + 10_000):
        found = Counter(whole.phase_at(kill.seconds) for kill in draw(tried, kills, whole.seconds))
        if all(found[stage] >= least for stage in (*STAGES, "other")):
            return tried
    raise ValueError(f"no seed of 10,000 from {seed} on gives {least} of {kills} kills to each of {STAGES}")


def kill_once(
    kill: Kill, nursery: Nursery, command: list[str], folder: pathlib.Path, whole: Whole,
    when: Callable[[], bool] | None = None,
) -> Outcome | None:
    """Kill one run, start it again and return the outcome; None where the run had ended before its kill was due.

    command: of a run in folder / "run". when: says that the kill is due, in place of the clock.
    """
    notes = folder / "notes"
    with attempt(nursery, command, folder / "killed") as ranks:
        due = wait_for_begin(ranks, notes) + kill.seconds
        is_due = when or (lambda: time.monotonic() >= due)
        while ranks.run() and not is_due():
            time.sleep(0.005)
        if not ranks.run():
            assert ranks.wait(BOUND_S) == [0] * WORLD, ranks.said()
            return None
        for rank in kill.ranks:
            ranks.forks[rank].send_signal(signal.SIGKILL)
        codes = ranks.wait(BOUND_S)
        assert None not in codes, f"a rank outlived the kill of {kill.ranks} by {BOUND_S} s\n{ranks.said()}"
        (phase, writing), ahead = read_note(notes, kill.ranks[0]), generates(notes, kill.ranks[0])
    found = whole_checkpoints(folder / "run" / "checkpoints")
    with attempt(nursery, command, folder / "again") as ranks:
        assert ranks.wait(BOUND_S) == [0] * WORLD, ranks.said()
    what = dict(resumed=found[-1] if found else None, differs=tuple(differences(whole.folder, folder)))
    return Outcome(kill=kill, phase=phase, ahead=ahead, writing=writing, codes=tuple(codes), **what)


def assert_same_end(whole: pathlib.Path, other: pathlib.Path, end: int) -> None:
    """Assert that two runs have the same checkpoint after ``end`` rollouts, metrics but for clocks, and trace."""
    assert same_tensors(*(tensors_of(x / "checkpoints" / name_of(end)) for x in (whole, other)))
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(other)]
    assert (whole / "trace.jsonl").read_text() == (other / "trace.jsonl").read_text()


def differences(whole: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Return the names of what is not the same in two runs' folders."""
    one, two = whole / "run", other / "run"
    ends = [x / "checkpoints" / name_of(whole_checkpoints(x / "checkpoints")[-1]) for x in (one, two)]
    tensors, states = [tensors_of(x) for x in ends], [json.loads((x / "state.json").read_text()) for x in ends]
    for state in states:
        state["backend"].pop("cost_sums")  # measured seconds
    same = {
        "weights": same_tensors(weights_of(one), weights_of(two)),
        "AdamW": same_tensors(*tensors) and any("exp_avg_sq" in key for key in tensors[0]),
        "metrics": [timeless(x) for x in rows_of(one)] == [timeless(x) for x in rows_of(two)],
        "trace": (one / "trace.jsonl").read_text() == (two / "trace.jsonl").read_text(),
        "rows": all(len({(end / own_file(rank)).read_bytes() for end in ends}) == 1 for rank in range(WORLD)),
        "state": all(states[0][key] == states[1][key] for key in SAME_STATE),
    }
    return [name for name, equal in same.items() if not equal]


def study(
    nursery: Nursery, kills: int, seed: int, layout: str, folder: pathlib.Path, *, least: int = 0,
    report: Callable[[str], object] = print,
) -> tuple[Whole, list[Outcome]]:
    """Return the uninterrupted run, and an outcome per kill; one that came too late is replaced by the next."""
    inputs = make_inputs(folder / "inputs")
    outcomes: list[Outcome] = []
    whole = whole_run(nursery, inputs, folder / "whole", layout)
    steps = len(rows_of(whole.folder / "run"))
    report(f"the uninterrupted run took {whole.seconds:.1f} s; it ended with {steps} optimizer steps")
    seed = first_seed(seed, kills, whole, least)
    report(f"seed {seed}")
    for number, kill in enumerate(draw(seed, 2 * kills, whole.seconds)):
        place = folder / f"kill{number}"
        place.mkdir()
        command = [str(place / "notes"), *arguments_of(inputs, place / "run", layout)]
        outcome = kill_once(kill, nursery, command, place, whole)
        if outcome is not None:
            outcomes.append(outcome)
        late = f"{kill.seconds:.2f} s: the run had ended; another is drawn"
        report(row_of(len(outcomes), outcome) if outcome else late)
        if len(outcomes) == kills:
            break
    return whole, outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kill_study", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=0, help="kills in each phase, by the choice of the seed")
    parser.add_argument("--layout", choices=LAYOUTS, default="DP2-sharded")
    parser.add_argument("--out", type=pathlib.Path, help="the table, as Markdown")
    parser.add_argument("--keep", type=pathlib.Path, help="a new folder for the runs instead of a temporary one")
    given = parser.parse_args(arguments)
    with contextlib.ExitStack() as held:
        folder = given.keep or pathlib.Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kill_study")))
        folder.mkdir(parents=True, exist_ok=True)
        said = functools.partial(print, flush=True)
        nursery = held.enter_context(Nursery())
        whole, outcomes = study(nursery, given.kills, given.seed, given.layout, folder, least=given.least, report=said)
    text = table(whole.seconds, outcomes)
    print(text)
    if given.out:
        given.out.write_text(text)
    return int(any(outcome.differs for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
