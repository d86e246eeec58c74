"""Profiled runs: the same numbers to the bit, ranges that are the plan's, and a summary that is the trace's."""

import pathlib
import re
import resource
import signal

import pytest
import torch

from megatron_rl.config import ProfileConfig
from megatron_rl.observability.profile.ranges import Ranges
from megatron_rl.observability.profile.recording import WHOLE, Recording
from megatron_rl.types import BatchPlan, StepKind
from tests.runs.command import PPO, SAVED, assert_same_run, rows_of, write_pairs
from tests.runs.profile_trace import OURS, Trace, busy_seconds, outermost_seconds, own_seconds
from tests.workers.inputs import prepare_inputs

RUN = ("parallel.pipeline=2", "train.samples_per_mini_batch=8", "plan.max_tokens_per_microbatch=24",
       "plan.share_prompts=false", "reward.functions=[tests.reward_functions:mostly_dead]", "metrics.save_plans=true")
FIRST, LAST, PER_ROLLOUT = 2, 6, 4
PROFILED = (f"profile.steps=[{FIRST},{LAST}]", "profile.ranks=[0,1]")
FIRSTS = (1, 2)  # the first step of each recording: that of the rollout around step 2, then step 2


@pytest.fixture(scope="module")
def ended(made, tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
    """Return the folder of a profiled run, and what each rank said."""
    folder = tmp_path_factory.mktemp("profiled") / "run"
    return folder, made.into(folder, 2, *RUN, *PROFILED)


@pytest.fixture(scope="module")
def profiled(ended) -> pathlib.Path:
    return ended[0]


@pytest.fixture(scope="module")
def traces(profiled) -> dict[tuple[int, int], Trace]:
    return {(rank, first): Trace(profiled, rank, first) for rank in (0, 1) for first in FIRSTS}


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory) -> pathlib.Path:
    """Make a model for two stages of two chunks each."""
    return prepare_inputs(tmp_path_factory.mktemp("four"), hidden=64, layers=4, heads=2, intermediate=96) / "model"


def steps_of(folder) -> dict[int, object]:
    """Return each step's plan by its number."""
    plans = [BatchPlan.from_json((folder / "plans" / f"rollout_{n}.json").read_text()) for n in (1, 2)]
    return dict(enumerate((step for plan in plans for step in plan.mini_batches), 1))


def test_a_profiled_run_equals_one_that_is_not(made, profiled):
    """Weights, rows, traces of rollouts and completions are equal to the bit."""
    assert_same_run(made(2, *RUN), profiled)
    names = {f"rank{rank}.{first}.{end}" for rank in (0, 1) for first in FIRSTS
             for end in ("pt.trace.json.gz", "summary.json")}
    assert {path.name for path in (profiled / "profile").iterdir()} == names
    assert {row["step_kind"] for row in rows_of(profiled)[FIRST - 1 : LAST]} == {"REAL", "GHOST"}


def test_ranges_of_a_thread_nest(traces):
    for trace in traces.values():
        assert not {span.kind.split()[0] for span in trace.ranges if "#" not in span.name} - set(OURS)
        for span in trace.ranges:
            for other in trace.ranges:
                if span.thread == other.thread and span is not other:
                    assert span.holds(other) or other.holds(span) or span.apart_from(other), (span, other)
        assert all(trace.whole.holds(span) for span in trace.ranges if span.thread == trace.whole.thread)


def test_passes_are_those_of_the_plan(profiled, traces):
    """Each stage runs each planned micro-batch once forward and once backward; a ghost and what is dropped run none."""
    plans, seen_ghost, most = steps_of(profiled), False, 0
    for rank in (0, 1):
        trace = traces[rank, FIRST]
        updates = trace.named("update")
        assert [span.name for span in updates] == [f"update step={n}" for n in range(FIRST, LAST + 1)]
        assert not traces[rank, 1].named("update")
        for number, update in zip(range(FIRST, LAST + 1), updates, strict=True):
            planned = range(len(list(plans[number].microbatches(0))))
            for kind, count in (("forward", planned), ("backward", planned), ("loss", planned if rank == 1 else ())):
                found = [span.name for span in trace.within(update, kind)]
                place = f" stage={rank} chunk=0" * (kind != "loss")
                assert found == [f"{kind} mb={n}{place}" for n in count], (number, kind)
            ghost = plans[number].kind is StepKind.GHOST
            assert len(trace.within(update, "ghost step")) == ghost
            assert len(trace.within(update, "reduction")) == len(trace.within(update, "optimizer step")) == 1 - ghost
            assert len(trace.within(update, "passes that train")) == (len(planned) > 0)
            seen_ghost, most = seen_ghost or ghost, max(most, len(planned))
    assert seen_ghost and most > 1


def test_a_rollout_is_recorded_from_its_beginning(traces):
    """What the rollout around the first step does is recorded, and the rollout after it whole."""
    for rank in (0, 1):
        before, steps = traces[rank, 1], traces[rank, FIRST]
        for trace in (before, steps):
            kinds = {span.kind for span in trace.ranges}
            assert {"rollout", "generate", "score", "reward", "plan", "weight_sync", "send weights"} <= kinds
            packing = {trace.threads[span.thread] for span in trace.named("pack")}
            assert packing <= {"packing_0"} and trace.threads[trace.whole.thread] == "main"
        assert len(steps.named("pack")) == len(steps.named("forward"))


def test_the_summary_adds_up(traces):
    """Counts, total, own and idle times, collectives and waits are those of the trace, summed in another way."""
    for (rank, first), trace in traces.items():
        found, main = trace.summary, trace.whole.thread
        assert (found["rank"], found["first_step"]) == (rank, first) and found["num_events"] == len(trace.events)
        near = {"abs": 1e-8 * len(trace.events), "rel": 0}  # a time has nanoseconds
        whole_s = (trace.whole.end - trace.whole.start) / 1e6
        assert found["window_s"] == pytest.approx(whole_s, **near)
        own = own_seconds(trace.ranges)
        assert {name: each["own_s"] for name, each in found["ranges"].items()} == pytest.approx(dict(own), **near)
        for name, each in found["ranges"].items():
            spans = [span for span in trace.ranges if span.kind == name]
            assert each["count"] == len(spans)
            assert each["total_s"] == pytest.approx(sum(span.end - span.start for span in spans) / 1e6, **near)
        operations = trace.of("cpu_op")
        assert sum(each["count"] for each in found["operations"].values()) == len(operations)
        assert sum(each["own_s"] for each in found["operations"].values()) == pytest.approx(
            outermost_seconds(operations), **near)
        on_main = [(x["ts"], x["ts"] + x["dur"]) for x in operations if x["tid"] == main]
        assert found["main_idle_share"] == pytest.approx(1 - busy_seconds(on_main, trace.whole) / whole_s, **near)
        collectives = [(span.start, span.end) for span in trace.collectives]
        assert found["collectives_s"] == pytest.approx(busy_seconds(collectives, trace.whole), **near)
        passes = [span for kind in ("forward", "loss", "backward") for span in trace.named(kind)]
        assert found["in_passes_s"] == pytest.approx(sum(span.end - span.start for span in passes) / 1e6, **near)
        assert found["device_idle_share"] is None and found["kernels"] == {}


def test_the_log_has_the_summary(ended, traces):
    said, _ = ended[1]
    operations = traces[0, FIRST].summary["operations"]
    longest = max(operations, key=lambda name: operations[name]["own_s"])  # the table cuts names at 43 characters
    assert re.search(rf"profile of rank 0 .*, steps {FIRST} to {LAST}: .*rank0\.{FIRST}\.pt\.trace\.json\.gz", said)
    assert re.search(r"profile of rank 0 .*, before step 1: .*rank0\.1\.pt\.trace\.json\.gz", said)
    for words in ("main thread in no operation of torch", "passes that train", longest[:43], "waits for the device"):
        assert words in said, words


SUPERVISED = ("parallel.pipeline=2", "train.num_rollouts=0", "reward.functions=[]", "sft.steps=4",
              "sft.samples_per_step=8")
OTHERS = {
    "interleaved": ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "plan.max_tokens_per_microbatch=48"),
    "a supervised start": ("parallel.pipeline=2", "sft.steps=2", "sft.samples_per_step=8"),
    "a critic": (*PPO, "parallel.pipeline=2"),
    "in the background": ("rollout.producer.mode=streaming", "rollout.producer.min_groups=2", "reward.num_workers=1",
                          "rollout.producer.max_staleness_steps=2"),
}


@pytest.mark.long(seconds=30)
@pytest.mark.parametrize("name", OTHERS)
def test_other_runs_are_the_same_when_profiled(made, four_layers, tmp_path, name):
    """Every forward of a model has its backward or is one that reads; the run equals the plain one to the bit."""
    overrides = (*OTHERS[name], *((f"model.hf_path={four_layers}",) if name == "interleaved" else ()))
    made.into(tmp_path, 2, *overrides, "profile.steps=[1,3]", "profile.ranks=[1]")
    assert_same_run(made(2, *overrides), tmp_path)
    firsts = (1, 3) if name == "a supervised start" else (1,)
    assert {path.name.split(".")[1] for path in (tmp_path / "profile").iterdir()} == {str(first) for first in firsts}
    for trace in (Trace(tmp_path, 1, first) for first in firsts):
        for model in ("critic ", "") if name == "a critic" else ("",):
            training = trace.named(f"{model}passes that train")
            assert training
            for passes in training:
                forwards = [span.name for span in trace.within(passes, f"{model}forward")]
                backwards = [span.name for span in trace.within(passes, f"{model}backward")]
                assert sorted(forwards) == sorted(name.replace("backward", "forward") for name in backwards)
                assert len(set(forwards)) == len(forwards)
                chunks = {re.search(r"stage=(\d) chunk=(\d)", each).groups() for each in forwards}
                assert chunks == ({("1", "0"), ("3", "1")} if name == "interleaved" else chunks) and chunks
        if name == "in the background":
            assert {trace.threads[span.thread] for span in trace.named("generate")} == {"rollouts"}
            assert {trace.threads[span.thread] for span in trace.named("score")} == {"rewards"}


@pytest.mark.long(seconds=20)
def test_pairs_are_profiled_with_their_reference_passes(made, arithmetic, tmp_path):
    pairs = write_pairs(arithmetic / "train.jsonl", tmp_path / "pairs.jsonl")
    given = (*SUPERVISED, "preference.loss=dpo", f"data.train={pairs}", "data.answer_key=answer")
    made.into(tmp_path / "run", 2, *given, "profile.steps=[2,3]")
    assert_same_run(made(2, *given), tmp_path / "run")
    trace = Trace(tmp_path / "run", 0, 2)
    assert [span.name for span in trace.named("update")] == ["update step=2", "update step=3"]
    assert [len(trace.within(stage, "passes that read")) for stage in trace.named("logprob")] == [2, 2]  # π and π_ref


@pytest.mark.long(seconds=20)
def test_memory_and_calls_are_recorded(made, tmp_path):
    """The peak of a range is the largest total at a moment within it, found by reading all moments."""
    made.into(tmp_path, 2, *RUN, "profile.steps=[1,1]", "profile.memory=true", "profile.stacks=true")
    assert_same_run(made(2, *RUN), tmp_path)
    trace = Trace(tmp_path, 0, 1)
    held = [(x["ts"], x["args"]["Total Allocated"]) for x in trace.events if x["name"] == "[memory]"]
    assert held and trace.of("python_function")
    for kind in ("forward", "backward", "update", "profiled"):
        peaks = []
        for span in (span for span in trace.ranges if span.kind == kind):
            before = [total for moment, total in held if moment < span.start][-1:]
            peaks.append(max(before + [total for moment, total in held if span.start <= moment <= span.end]))
        assert trace.summary["ranges"][kind]["peak_bytes"] == max(peaks) > 0


@pytest.mark.long(seconds=10)
def test_a_wait_in_a_loss_is_counted_once_a_micro_batch(made, tmp_path):
    own = "loss.policy=tests.own_parts:waits"
    made.into(tmp_path, 2, *RUN, own, "profile.steps=[1,4]", "profile.ranks=[1]")
    waits = Trace(tmp_path, 1, 1).summary["waits"]
    trains = len(Trace(tmp_path, 1, 1).named("backward"))
    reads = len(Trace(tmp_path, 1, 1).named("forward")) - trains
    assert trains and waits["forward"] == waits["backward"] == {}
    assert waits["loss"] == {"aten::_local_scalar_dense": pytest.approx(trains / (trains + reads))}


@pytest.mark.long(seconds=10)
def test_what_a_failing_run_recorded_is_written(made, tmp_path):
    """A run that ends by an error ends as it does without a profile, and leaves its trace."""
    failing = ("parallel.pipeline=2", "reward.functions=[tests.reward_functions:broken]")
    said = made.into(tmp_path / "plain", 2, *failing, code=1)
    recorded = made.into(tmp_path / "run", 2, *failing, "profile.steps=[1,2]", code=1)
    assert all("undefined_name" in each for each in said + recorded)
    trace = Trace(tmp_path / "run", 0, 1)
    assert trace.named("generate") and not trace.named("update")


@pytest.mark.long(seconds=20)
def test_a_profile_that_cannot_be_written_costs_a_warning(made, tmp_path):
    (tmp_path / "profile").write_text("a file where the folder would be")
    said, _ = made.into(tmp_path, 2, *RUN, "profile.steps=[2,2]")
    assert_same_run(made(2, *RUN), tmp_path)
    assert said.count("cannot be written, and the run goes on without it") == 2 and "Traceback" not in said


def record_little(rank: int, world: int, folder: pathlib.Path) -> None:
    """Record 200 products in a process whose files may take 64 KiB each, and then one."""
    recording = Recording(ProfileConfig(steps=(1, 1)), folder, rank, "rank 0")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for number, count in ((1, 200), (2, 1)):
        recording.start()
        ranges = Ranges(recording.mark, WHOLE)
        for _ in range(count):
            torch.ones(3, 3) @ torch.ones(3, 3)
        ranges.take_off()
        recording.stop(number, number)


@pytest.mark.long(seconds=10)
def test_a_file_that_ends_early_is_not_left_behind(pool, tmp_path):
    """A trace that cannot be written whole leaves nothing; the next one, which can, is there."""
    pool.run(1, record_little, tmp_path, spoils=True)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.2.pt.trace.json.gz", "rank0.2.summary.json"}


@pytest.mark.long(seconds=20)
def test_steps_that_a_checkpoint_has_taken_are_not_recorded_again(made, tmp_path):
    whole = made(2, *SAVED, "parallel.pipeline=2", "train.num_rollouts=3")
    again = made.again(whole, 1, "profile.steps=[1,4]")
    assert_same_run(whole, again)
    assert sorted(path.name for path in (again / "profile").glob("*.gz")) == ["rank0.3.pt.trace.json.gz"]
    assert [span.name for span in Trace(again, 0, 3).named("update")] == ["update step=3", "update step=4"]
    assert Trace(again, 0, 3).named("checkpoint")


@pytest.mark.long(seconds=10)
def test_steps_beyond_the_end_are_named(made, tmp_path):
    said, _ = made.into(tmp_path, 2, *RUN, "profile.steps=[8,12]")
    assert "profile.steps=[8, 12] goes beyond the run's 8 optimizer steps" in said
    assert Trace(tmp_path, 0, 5).named("rollout") and not Trace(tmp_path, 0, 5).named("update")
    assert [span.name for span in Trace(tmp_path, 0, 8).named("update")] == ["update step=8"]
