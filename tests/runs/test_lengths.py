"""Whole runs whose rollouts start the longest groups first, or leave their stragglers to the next rollout."""

import itertools
import json
import pathlib
import threading
import time
from unittest import mock

import pytest

from megatron_rl.model.seam_fields import DTYPES
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.rollout.engines.engine import group_sizes
from megatron_rl.rollout.vllm import build
from tests.pairwise import quick
from tests.patience import patient
from tests.runs.command import SAVED, assert_same_run, command_line, few_prompts, firsts_of, state_of, trained_prompts

EVERY, LATE_S = 5, 0.5
LONGEST_FIRST = "rollout.start_order=longest_first"
STRAGGLING = (
    "rollout.engine=vllm",  # StragglingEngine stands in
    f"run.deadline_s={patient(120):g}", "rollout.start_s=60", "rollout.request_s=60", "rollout.max_logprob_gap=null",
    "rollout.producer.mode=prefetch", "rollout.producer.straggler_share=0.25", "weight_sync.in_flight=true",
    "correction.mode=token_truncate",
)


class StragglingEngine(TransformersEngine):
    """Stands in for vLLM with weights in flight: the groups of every ``EVERY``-th row come ``LATE_S`` seconds late."""

    is_elsewhere = True

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        self._one_at_a_time = threading.Lock()

    def load_weights(self, tensors, version):
        with self._one_at_a_time:
            return super().load_weights(tensors, version)

    def generate(self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None):
        with self._one_at_a_time:
            rollouts = super().generate(prompts, samples_per_prompt, temperature=temperature, max_tokens=max_tokens)
        ends = list(itertools.accumulate(group_sizes(prompts, samples_per_prompt)))
        late = [int(prompt.prompt_id.partition("@")[0]) % EVERY == 0 for prompt in prompts]
        for comes_late in (False, True):
            if comes_late and any(late):
                time.sleep(LATE_S)
            for index in range(len(prompts)):
                if late[index] == comes_late and on_finished is not None:
                    on_finished(index, rollouts[([0, *ends])[index] : ends[index]])
        return rollouts


def straggling(rank: int, world: int, given: list[str]) -> tuple[int, str]:
    """Run the command line with this engine in the place of vLLM's, whose settings the configuration has."""

    def vllm_engine(config, tokenizer, *, location, role, device, vocab_size):
        given = dict(seed=config.run.seed, dtype=DTYPES[config.model.dtype], device=device)
        return StragglingEngine(config.model.hf_path, tokenizer, config.rollout, **given)

    with mock.patch.object(build, "vllm_engine", vllm_engine):
        return command_line(rank, world, given)


@pytest.mark.parametrize("world", quick([1, 2], 1))
def test_longest_first_equals_drawn_order_bit_for_bit(made, arithmetic, tmp_path, world):
    """In the second epoch all lengths are known. At two ranks another one may sample a group, in another batch: the
    engine's log-probs round otherwise, so the gap between its and the trainer's, which trains, is not compared.
    """
    engine_alone = "train/logprob_gap" if world > 1 else "nothing"
    given = (few_prompts(arithmetic, tmp_path, 16), *SAVED, "rollout.max_response_tokens=24", "train.num_rollouts=4")
    drawn, longest = made(world, *given, "rollout.start_order=drawn"), made(world, *given, LONGEST_FIRST)
    assert [len(state_of(folder, 4)["feed"]["lengths"]) for folder in (drawn, longest)] == [0, 16]
    assert_same_run(drawn, longest, engine_alone, files=["trace.jsonl"])
    assert all(row["perf/rollout_tail_s"] >= 0.0 for row in firsts_of(drawn) + firsts_of(longest))


@pytest.mark.long
def test_lengths_go_on_from_a_checkpoint(made, arithmetic, tmp_path):
    """A run that goes on from a checkpoint has the lengths of the whole one, and ends with its queue and weights."""
    data = few_prompts(arithmetic, tmp_path, 16)
    whole = made(2, data, LONGEST_FIRST, *SAVED, "rollout.producer.mode=prefetch", "train.num_rollouts=4")
    part = made.again(whole, 2)
    assert len(state_of(part, 2)["feed"]["lengths"]) == 16 and state_of(part, 4)["feed"] == state_of(whole, 4)["feed"]
    assert_same_run(whole, part)


def batches_of(run_dir: pathlib.Path) -> list[int]:
    """Return the number of groups of every rollout."""
    return [len(json.loads(line)["prompts"]) for line in (run_dir / "trace.jsonl").read_text().splitlines()]


def check_straggling(run_dir: pathlib.Path, num_rollouts: int, *, limit: float) -> None:
    """Check that each rollout trained 8 groups, none twice and none too old, and but for the last one left 2."""
    firsts = firsts_of(run_dir, "async/stragglers")
    assert [row["rollout"] for row in firsts] == list(range(1, num_rollouts + 1))
    assert batches_of(run_dir) == [8] * num_rollouts and len(set(trained_prompts(run_dir))) == 8 * num_rollouts
    assert max(row["async/staleness_max"] for row in firsts) <= limit
    assert sum(row["async/dropped_stale"] for row in firsts) == 0.0
    assert [row["async/stragglers"] for row in firsts] == [2.0] * (num_rollouts - 1) + [0.0]


@pytest.mark.parametrize("ahead", quick([1, 2], 2))
def test_every_group_is_trained_once_beside_stragglers(made, ahead):
    """At DP2 each rollout but the last leaves 2 of its groups to the next, within the bound of staleness."""
    limit = 2 * (ahead + 1)
    bounds = (f"rollout.producer.prefetch_rollouts={ahead}", f"rollout.producer.max_staleness_steps={limit}")
    check_straggling(made(2, *STRAGGLING, *bounds, "train.num_rollouts=4", run=straggling), 4, limit=limit)


@pytest.mark.parametrize("resumed", quick([(2, 0.25), (1, 0.25), (2, 0)]), ids=str)
def test_stragglers_go_on_from_a_checkpoint(made, resumed):
    """Every prompt is trained once, by one rank of two too. With ``straggler_share: 0`` a run takes in those left."""
    world, share = resumed
    whole = made(2, *STRAGGLING, *SAVED, "train.num_rollouts=4", run=straggling)
    check_straggling(whole, 4, limit=4.0)
    assert len(state_of(whole, 2)["feed"]["left"]) == 2 and not state_of(whole, 4)["feed"]["left"]
    prompts = trained_prompts(made.again(whole, 2, f"rollout.producer.straggler_share={share}", world=world))
    assert len(prompts) == 32 and sorted(prompts) == sorted(trained_prompts(whole))


def test_an_epoch_ends_with_every_prompt_trained_once(made, arithmetic, tmp_path):
    """Under ``train.epochs`` the stragglers of the last prompts make up the last rollout: 20 prompts in 3 rollouts."""
    epoch = (few_prompts(arithmetic, tmp_path, 20), "train.num_rollouts=null", "train.epochs=1")
    run = made(2, *STRAGGLING, *epoch, run=straggling)
    assert len(trained_prompts(run)) == len(set(trained_prompts(run))) == 20 and batches_of(run) == [8, 8, 4]
