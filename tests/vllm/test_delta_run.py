"""Whole runs whose engine gets what changed alone, and is killed in between: it holds the trainer's bits to the end."""

import statistics

import pytest

from tests.runs.command import command_line, rows_of
from tests.vllm.rig import make_prompts, sender_of
from tests.vllm.served import engines_killed_at_work

pytestmark = [pytest.mark.vllm, pytest.mark.long(seconds=150)]

NUM_ROLLOUTS = 6
# At this rate most elements of bfloat16 keep their bits in a step.
BFLOAT16 = ("model.dtype=bfloat16", "optimizer.lr=1e-5", "optimizer.schedule=constant", "rollout.num_engines=1")
BFLOAT16 += ("rollout.max_response_tokens=24", "rollout.max_logprob_gap=null", f"train.num_rollouts={NUM_ROLLOUTS}")
DELTA = ("weight_sync.delta=true", "weight_sync.full_every=100", "weight_sync.bucket_mb=0.05")


def watched_run(rank: int, world: int, given: list[str], moments: tuple[int, ...] = ()) -> tuple:
    """Run the command line, and note what each sync sent and what the engine's workers say that they hold after it.

    It is killed under its first request by the weights of ``moments``. At its end it answers some prompts, gets its
    last weights once more, whole and by another sender, and answers again.
    """
    from megatron_rl.rollout.vllm.engine import VllmEngine
    from megatron_rl.rollout.weight_sync.encoder import WholeEncoder

    syncs, answers, last, taken = [], [], {}, {}

    def answer(engine: VllmEngine) -> list[tuple]:
        prompts = make_prompts(4, 9, 14)  # one at a time, so that an engine's batches are the same
        return [(x.response_ids, x.logprobs) for prompt in prompts for x in engine.generate([prompt], 1)]

    def load_weights(engine, tensors, version):
        last.clear()
        report = load(engine, ((name, last.setdefault(name, x.clone())) for name, x in tensors), version)
        for replica in engine._replicas if not report.failed else ():
            held = replica.control("weights_received", {}, 60.0)
            sent = getattr(engine._sync.encoder, "receipts", taken).get(id(replica))
            kept = [tuple(x[k] for k in ("version", "checksum", "num_tensors")) for x in held]
            sizes = {"bytes": report.num_bytes, "sent_bytes": report.sent_bytes, "changed": report.changed_share}
            sent = sent and (sent.version, sent.checksum, sent.num_tensors)
            syncs.append({"version": version, "held": kept, "sent": sent} | sizes)
        return report

    def close(engine):
        if engine._replicas and not answers:
            answers.append(answer(engine))
            sender = sender_of()
            report = sender.deliver(iter(last.items()), engine.weight_version, engine._replicas)
            sender.free()
            answers.append(report.failed or answer(engine))
        return shut(engine)

    with pytest.MonkeyPatch.context() as patch, engines_killed_at_work(moments) as killed:
        load, shut = VllmEngine.load_weights, VllmEngine.close
        patch.setattr(VllmEngine, "load_weights", load_weights)
        patch.setattr(VllmEngine, "close", close)
        patch.setattr(WholeEncoder, "took", lambda _, replica, receipt: taken.update({id(replica): receipt}))
        code, said = command_line(rank, world, given)
    return code, said, syncs, answers, len(killed)


def gaps_of(run_dir) -> list[float]:
    return [row["train/logprob_gap_mean"] for row in rows_of(run_dir) if "train/logprob_gap_mean" in row]


@pytest.mark.parametrize("kind", ["arithmetic", "mixture"])
def test_an_engine_holds_the_trainers_bits_through_a_run(run, request, tmp_path, kind):
    """Receipts say so after every sync; it answers to the bit as after a whole one; gaps are a whole run's."""
    layout = {"folder": request.getfixturevalue(kind), "world": 2 if kind == "mixture" else 1}
    given = (*BFLOAT16, f"parallel.expert={layout['world']}")
    run(*given, function=watched_run, out=tmp_path / "whole", **layout)
    results = run(*given, *DELTA, function=watched_run, more=((4,),), out=tmp_path / "delta", **layout)
    said, syncs, (before, after), killed = results[0]
    assert killed == 1 and said.count("is started again") == 1, said
    for sync in syncs:
        print({k: sync[k] for k in ("sent", "bytes", "sent_bytes", "changed")})
        assert sync["held"] and set(sync["held"]) == {sync["sent"]} and sync["sent"][0] == sync["version"], sync
    assert len({x["version"] for x in syncs}) == NUM_ROLLOUTS
    whole = [x["changed"] is None for x in syncs]
    assert whole[0] and sum(whole) == 2 and not whole[-1], syncs  # the first, and the one of the restarted engine
    assert all(x["sent_bytes"] < 0.5 * x["bytes"] for x in syncs if x["changed"] is not None), syncs
    assert before == after
    one, two = (statistics.median(gaps_of(tmp_path / name)) for name in ("whole", "delta"))
    print(f"mean gap, nats per token: {one:.3g} by whole syncs, {two:.3g} by changes")
    assert 0 < two < 1.5 * one
