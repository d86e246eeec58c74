"""Whole runs whose engine gets what changed alone, and is killed in between: it holds the trainer's bits to the end."""

from __future__ import annotations

import statistics

import pytest

from tests.runs.command import arguments, command_line, rows_of
from tests.vllm.rig import make_prompts
from tests.vllm.served import VLLM, engines_killed_at_work

pytestmark = [pytest.mark.vllm, pytest.mark.long(seconds=150)]

NUM_ROLLOUTS = 6
BFLOAT16 = (
    *VLLM,
    "model.dtype=bfloat16",
    "optimizer.lr=1e-5",  # most elements keep their bits in a step
    "optimizer.schedule=constant",
    "rollout.num_engines=1",
    "rollout.max_response_tokens=24",
    "rollout.max_logprob_gap=null",
    f"train.num_rollouts={NUM_ROLLOUTS}",
)
DELTA = ("weight_sync.delta=true", "weight_sync.full_every=100", "weight_sync.bucket_mb=0.05")


def watched_run(rank: int, world: int, given: list[str], moments: tuple[int, ...] = ()) -> dict:
    """Run the command line, and note what each sync sent and what the engine's workers say that they hold after it.

    moments: the weights, counted from 1, under whose first request the engine is killed.
    Before the engine is closed it answers some prompts, gets the weights of its last sync once more, whole and by
    another sender, and answers again.
    """
    import torch

    from megatron_rl.rollout.vllm.engine import VllmEngine
    from megatron_rl.rollout.weight_sync.sender import WeightSender

    syncs, answers, last = [], [], {}

    def answer(engine: VllmEngine) -> list[tuple]:
        prompts = make_prompts(4, 9, 14)  # one at a time, so that an engine's batches are the same
        return [(x.response_ids, x.logprobs) for prompt in prompts for x in engine.generate([prompt], 1)]

    def load_weights(engine, tensors, version):
        last.clear()
        report = load(engine, ((name, last.setdefault(name, x.clone())) for name, x in tensors), version)
        for replica in engine._replicas if not report.failed else ():
            held, sent = replica.control("weights_received", {}, 60.0), engine._sync.receipts.get(id(replica))
            syncs.append(
                {
                    "version": version,
                    "held": [{k: x[k] for k in ("version", "checksum", "num_tensors")} for x in held],
                    "sent": None if sent is None else (sent.version, sent.checksum, sent.num_tensors),
                    "bytes": report.num_bytes,
                    "sent_bytes": report.sent_bytes,
                    "changed": report.changed_share,
                }
            )
        return report

    def close(engine):
        if engine._replicas and not answers:
            answers.append(answer(engine))
            sender = WeightSender(
                channel="shared_memory", bucket_bytes=1 << 20, deadline_s=60.0, device=torch.device("cpu")
            )
            report = sender.deliver(iter(last.items()), engine.weight_version, engine._replicas)
            sender.free()
            answers.append(report.failed or answer(engine))
        return shut(engine)

    with pytest.MonkeyPatch.context() as patch, engines_killed_at_work(moments) as killed:
        load, shut = VllmEngine.load_weights, VllmEngine.close
        patch.setattr(VllmEngine, "load_weights", load_weights)
        patch.setattr(VllmEngine, "close", close)
        code, said = command_line(rank, world, given)
    return {"code": code, "said": said, "syncs": syncs, "answers": answers, "killed": len(killed)}


def gaps_of(run_dir) -> list[float]:
    return [row["train/logprob_gap_mean"] for row in rows_of(run_dir) if "train/logprob_gap_mean" in row]


@pytest.mark.parametrize(
    ("kind", "world", "layout"),
    [("arithmetic", 1, ()), ("mixture", 2, ("parallel.expert=2",))],
    ids=["dense", "mixture, EP2"],
)
def test_an_engine_holds_the_trainers_bits_through_a_run(pool, request, tmp_path, kind, world, layout):
    """An engine that got changes, was killed, and got changes again holds the trainer's bits.

    Its workers' receipts say so after every sync, and it answers to the bit as after a whole sync. Its log-probs are as
    far from the trainer's as in a run whose syncs are whole.
    """
    folder = request.getfixturevalue(kind)
    given = (*BFLOAT16, *layout)
    pool.run(world, watched_run, arguments(folder, tmp_path / "whole", *given), timeout_s=300)
    delta = arguments(folder, tmp_path / "delta", *given, *DELTA)
    results = pool.run(world, watched_run, delta, (4,), timeout_s=300)
    assert [x["code"] for x in results] == [0] * world, results
    assert results[0]["killed"] == 1 and results[0]["said"].count("is started again") == 1, results[0]["said"]
    syncs, (before, after) = results[0]["syncs"], results[0]["answers"]
    for sync in syncs:
        print({k: sync[k] for k in ("version", "bytes", "sent_bytes", "changed")})
        assert sync["held"] and all(tuple(x.values()) == sync["sent"] for x in sync["held"]), sync
        assert sync["sent"][0] == sync["version"]
    assert len({x["version"] for x in syncs}) == NUM_ROLLOUTS
    whole = [x["changed"] is None for x in syncs]
    assert whole[0] and sum(whole) == 2 and not whole[-1], syncs  # the first, and the one of the restarted engine
    assert all(x["sent_bytes"] < 0.5 * x["bytes"] for x in syncs if x["changed"] is not None), syncs
    assert before == after
    one, two = (statistics.median(gaps_of(tmp_path / name)) for name in ("whole", "delta"))
    print(f"mean gap, nats per token: {one:.3g} by whole syncs, {two:.3g} by changes")
    assert 0 < two < 1.5 * one
