"""Drafters with weights in a real engine on a CPU: they change counts alone, and what spoils their weights is seen."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.rollout.engines.replica import check_drafters
from megatron_rl.rollout.speculation.counts import ACCEPTED, DRAFTED, PASSES
from tests.reference import file_weights
from tests.runs.command import few_prompts, rows_of
from tests.vllm.calls import LONG, spans_hold
from tests.vllm.distribution import chance_of, pair_probabilities
from tests.vllm.heads import draft_model, head, model_with_heads
from tests.vllm.rig import (
    BLOCK_TOKENS,
    DEADLINE_S,
    LOGPROB_TOLERANCE,
    Bench,
    make_prompts,
    model_folder,
    ready,
    running,
    start_bench,
    told,
)
from tests.vllm.served import GAP

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

# Of lengths 1 and BLOCK_TOKENS + 1 one token is left to compute, and vLLM pads their first steps with drafts of −1.
PROMPTS = make_prompts(5, 2, 40, 1, 17, BLOCK_TOKENS + 1, 100, 64)
SAMPLES, CALLS = 16, 30
# kind → method, how it samples its drafts; "policy" has the policy's weights of seed 1, the others have random ones
KINDS = {
    "policy": ("draft_model", "greedy"),
    "policy_drawn": ("draft_model", "probabilistic"),
    "other": ("draft_model", "greedy"),
    "other_drawn": ("draft_model", "probabilistic"),
    "eagle": ("eagle", "greedy"),
    "eagle3": ("eagle3", "probabilistic"),
}
SOME = ["policy", "other_drawn", "eagle"]


def settings(inputs, root, kind: str, fields: str = "") -> tuple[str, ...]:
    """Write the drafter's folder, and return the run's settings that name it."""
    method, sampling = KINDS[kind]
    if method == "draft_model":
        given = {"seed": 1} if kind.startswith("policy") else {"seed": 9, "intermediate": 48}
        folder = draft_model(inputs / "model", root / "drafter", **given)
    else:
        folder = head(root / "drafter", method)
    drafts = f"speculative_config: {{model: {folder}, draft_sample_method: {sampling}}}"
    return f"rollout.speculation={method}", f"rollout.vllm={{max_num_seqs: 64, {drafts}{fields}}}"


@pytest.fixture(scope="module", params=[x if x in SOME else pytest.param(x, marks=pytest.mark.long) for x in KINDS])
def drafting(request, inputs, tmp_path_factory):
    """Return an engine that drafts, with the weights of seed 1, and the kind of its drafter."""
    root = tmp_path_factory.mktemp("drafting")
    with running(inputs, root, "qwen2", *settings(inputs, root, request.param)) as started:
        started.load(1)
        yield started, request.param


def receipts_of(bench: Bench) -> list[dict]:
    return bench.replica.control("weights_received", {}, DEADLINE_S)


def test_greedy_tokens_equal_the_plain_engines(drafting):
    """The policy's own weights have nearly all drafts accepted; where an answer ends, the rest of a draft is lost."""
    bench, kind = drafting
    wanted = told(bench.in_this_process(1).generate(PROMPTS, 1, temperature=0.0))
    bench.engine.speculation.take_counts()
    assert told(bench.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted
    counts = bench.engine.speculation.take_counts()
    print(kind, counts)
    tokens = sum(len(ids) for _, ids, _ in wanted)
    assert counts[DRAFTED] > 0
    if kind.startswith("policy"):
        assert counts[ACCEPTED] > 0.8 * counts[DRAFTED] and counts[PASSES] < 0.4 * tokens
    else:
        assert counts[ACCEPTED] < 0.5 * counts[DRAFTED]


def test_logprobs_equal_hugging_faces(drafting):
    """Drafts that are drawn from the policy's own distribution are nearly all accepted, as are greedy ones of it."""
    bench, kind = drafting
    bench.engine.speculation.take_counts()
    for attempt in range(2):
        prompts = [replace(prompt, attempt=attempt) for prompt in PROMPTS]
        assert bench.largest_gap(prompts, 8) < LOGPROB_TOLERANCE
    counts = bench.engine.speculation.take_counts()
    print(kind, counts)
    assert kind != "policy_drawn" or counts[ACCEPTED] > 0.8 * counts[DRAFTED]


def test_sampled_pairs_have_the_models_distribution(drafting):
    """A chi-square test of all samples of a prompt; of 10,000 right engines a few fail."""
    bench, kind = drafting
    bench.engine.speculation.take_counts()
    for place, length in enumerate((7, BLOCK_TOKENS + 1)):
        (prompt,) = make_prompts(length)
        prompts = [replace(prompt, prompt_id=f"{place}@{call}") for call in range(CALLS)]
        found = Counter(x.response_ids[:2] for x in bench.engine.generate(prompts, SAMPLES, max_tokens=[3] * CALLS))
        wanted = pair_probabilities(bench.model, prompt.token_ids, bench.config.rollout.temperature, stop=0)
        assert sum(found.values()) == CALLS * SAMPLES and set(found) <= set(wanted)
        assert chance_of(found, wanted) > 1e-4
    counts = bench.engine.speculation.take_counts()
    print(kind, counts)
    assert counts[ACCEPTED] > 0 and counts[DRAFTED] > CALLS * SAMPLES


def test_a_sync_moves_the_policy_and_not_the_drafter(drafting):
    """After each sync tokens are those of the new weights, and the drafter's checksum is that of its start."""
    bench, kind = drafting
    (before,) = receipts_of(bench)
    assert before["drafter"]["loaded"] == before["drafter"]["held"] and len(before["drafter"]["held"]) == 16
    assert before["drafter"]["model"].endswith("drafter")
    accepted = []
    for seed in (2, 3, 1):
        bench.load(seed)
        bench.engine.speculation.take_counts()
        wanted = told(bench.in_this_process(seed).generate(PROMPTS, 1, temperature=0.0))
        assert told(bench.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted
        counts = bench.engine.speculation.take_counts()
        accepted.append(counts[ACCEPTED] / counts[DRAFTED])
        (after,) = receipts_of(bench)
        assert after["drafter"] == before["drafter"] and after["version"] == bench.engine.weight_version
        check_drafters("the engine", [after])
    print(kind, accepted)
    assert not kind.startswith("policy") or max(accepted[:2]) < 0.8 < accepted[2]


def test_requests_find_whole_blocks_again_and_have_the_right_logprobs(drafting):
    """The drafter's keys and values lie in the same blocks; a prompt in the cache is drafted for all the same."""
    bench, _ = drafting
    prompts = make_prompts(3 * BLOCK_TOKENS + 4, 2 * BLOCK_TOKENS + 9)
    for _ in range(2):
        assert bench.largest_gap(prompts) < LOGPROB_TOLERANCE


def start_spoiling(worker: str, folder, root, *overrides: str) -> Bench:
    """Start an engine whose workers spoil their drafter at the message ``use_adapter``."""
    bench = start_bench(folder, root / "run", *overrides)
    bench.replica.arguments["worker_extension_cls"] = f"tests.vllm.spoiling.{worker}"
    bench.replica.restart()
    return bench


def holds_norms(bench: Bench, folder, *parts: str) -> None:
    """Assert that norms of the drafter have the sums of their tensors in the folder's file; then spoil the drafter."""
    (found,) = bench.replica.control("use_adapter", {}, DEADLINE_S)
    wanted = {name: x.double().sum().item() for name, x in load_file(folder / "model.safetensors").items()}
    for part in parts:
        (in_engine,), (in_file,) = ([x for name, x in sums.items() if part in name] for sums in (found, wanted))
        assert in_engine == pytest.approx(in_file, rel=1e-12)


@pytest.mark.parametrize(
    ("worker", "kind"),
    [("SpoilingParameter", "eagle"), pytest.param("SpoilingLayer", "policy", marks=pytest.mark.long)],
)
def test_spoiled_weights_end_the_engine_at_the_next_sync(inputs, tmp_path, worker, kind):
    """The sync fails and names the drafter; the engine is started again, with the drafter's weights from its files."""
    folder = model_folder(inputs / "model", tmp_path / "model", "qwen2", tied=True)
    with ready(start_spoiling(worker, folder, tmp_path, *settings(inputs, tmp_path, kind))) as bench:
        bench.load(1)
        (whole,) = receipts_of(bench)
        if worker == "SpoilingParameter":
            holds_norms(bench, tmp_path / "drafter", "post_attention_layernorm")
        else:
            bench.replica.control("use_adapter", {}, DEADLINE_S)
        (spoiled,) = receipts_of(bench)
        assert spoiled["drafter"]["held"] != whole["drafter"]["held"] == spoiled["drafter"]["loaded"]
        report = bench.sync(bench.weights(2).items())
        (reason,) = report.failed.values()
        assert "other weights of the drafter" in reason and str(tmp_path / "drafter") in reason
        assert report.lost
        bench.load_again(1, report.version, report.lost)
        assert receipts_of(bench)[0]["drafter"] == whole["drafter"]
        wanted = told(bench.in_this_process(1).generate(PROMPTS, 1, temperature=0.0))
        assert told(bench.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted


@torch.no_grad()
def likeliest(bench: Bench, rollout) -> list[int]:
    """Return the token that Hugging Face finds likeliest at each place of a response."""
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.response_ids]])
    return bench.model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].argmax(dim=-1).tolist()


def test_heads_of_the_policys_own_checkpoint_draft(inputs, tmp_path):
    """MTP heads come from the files of model.hf_path, and stay as they are; embedding and output move with syncs."""
    folder = tmp_path / "model"
    model = model_with_heads(inputs / "model", folder)
    fields = "rollout.vllm={max_num_seqs: 64, speculative_config: {num_speculative_tokens: 2}}"
    with ready(start_spoiling("SpoilingParameter", folder, tmp_path, "rollout.speculation=mtp", fields)) as bench:
        bench.model = model
        checksums = set()
        for factor in (1.0, 1.1):
            with torch.no_grad():
                model.lm_head.weight.mul_(factor)
            report = bench.sync(file_weights(model).items())
            assert not report.failed, report.failed
            bench.engine.speculation.take_counts()
            rollouts = bench.engine.generate(PROMPTS, 1, temperature=0.0)
            counts = bench.engine.speculation.take_counts()
            print(counts)
            assert all(list(x.response_ids) == likeliest(bench, x) for x in rollouts)
            assert counts[DRAFTED] > 0
            assert bench.largest_gap(PROMPTS) < LOGPROB_TOLERANCE
            checksums |= {receipt["drafter"]["held"] for receipt in receipts_of(bench)}
        assert len(checksums) == 1 and len(receipts_of(bench)[0]["drafter"]["held"]) == 16
        holds_norms(bench, folder, "enorm", "hnorm", "shared_head.norm")
        (reason,) = bench.sync(file_weights(model).items()).failed.values()
        assert f"other weights of the drafter {folder}" in reason


@pytest.mark.long
@pytest.mark.parametrize("kind", ["policy", "other_drawn", "eagle"])
def test_weights_in_flight(kind, inputs, tmp_path):
    """Each token is of the weights of its span; LONG's requests meet two syncs."""
    _, few = given = settings(inputs, tmp_path, kind)
    with running(inputs, tmp_path, "qwen2", given[0], *LONG, few.replace("64", "4", 1)) as bench:
        bench.engine._stop_ids = ()
        spans_hold(bench, bench.load, bench.weights)


@pytest.mark.long
def test_two_workers_sign_for_their_slices(inputs, tmp_path):
    """Each of two workers holds half of the drafter; drafts of the policy's own weights are accepted."""
    given = settings(inputs, tmp_path, "policy")
    with running(inputs, tmp_path, "qwen2", *given, "rollout.tensor_parallel=2", ranks=2) as bench:
        bench.load(1)
        before = [x["drafter"] for x in receipts_of(bench)]
        assert len(before) == 2 and all(x["held"] == x["loaded"] for x in before)
        bench.engine.speculation.take_counts()
        wanted = told(bench.in_this_process(1).generate(PROMPTS, 1, temperature=0.0))
        assert told(bench.engine.generate(PROMPTS, 1, temperature=0.0)) == wanted
        counts = bench.engine.speculation.take_counts()
        assert counts[ACCEPTED] > 0.8 * counts[DRAFTED]
        bench.load(2)
        assert [x["drafter"] for x in receipts_of(bench)] == before


@pytest.mark.long
def test_a_run_counts_what_was_drafted(run, arithmetic, tmp_path):
    """Weights move between rollouts, the gap stays a plain run's, and the counts are in the metrics."""
    folder = draft_model(arithmetic / "model", tmp_path / "drafter", 1)
    fields = f"rollout.vllm={{speculative_config: {{model: {folder}, num_speculative_tokens: 2}}}}"
    run("rollout.speculation=draft_model", fields, few_prompts(arithmetic, tmp_path, 16), "train.num_rollouts=3")
    rows = [row for row in rows_of(tmp_path) if "speculation/drafted" in row and "train/logprob_gap_max" in row]
    assert len(rows) >= 2 and max(row["train/logprob_gap_max"] for row in rows) < GAP
    assert all(0 <= row["speculation/accepted"] <= row["speculation/drafted"] for row in rows)
    assert sum(row["speculation/drafted"] for row in rows) > 0
    assert all(row["speculation/tokens_per_pass"] >= 1 for row in rows)
