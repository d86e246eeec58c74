"""Holds weights that move a little at each step, as a trainer's do, and sends what changed to a real engine."""

import torch

from megatron_rl.rollout.engines.engine import SyncReport
from tests.vllm.rig import LOGPROB_TOLERANCE, Bench, make_prompts

PROMPTS = make_prompts(5, 40, 70)
FULL_EVERY = 6
DELTA = ("weight_sync.delta=true", f"weight_sync.full_every={FULL_EVERY}", "weight_sync.bucket_mb=0.12")


class Trainer:
    """Holds weights that move by steps of Adam's size, and sends them to a bench's engine."""

    def __init__(self, bench: Bench, seed: int, share: float = 0.004) -> None:
        self.bench, self.share = bench, share
        self.random = torch.Generator().manual_seed(seed)
        self.weights = bench.weights(seed)

    def step(self) -> SyncReport:
        """Move a share of the elements, those of one tensor in four not at all, and send the weights."""
        for index, tensor in enumerate(self.weights.values()):
            if index % 4:
                moved = torch.rand(tensor.shape, generator=self.random) < self.share
                tensor[moved] += 0.05 * torch.randn(int(moved.sum()), generator=self.random)
        return self.send()

    def send(self) -> SyncReport:
        self.bench.model.load_state_dict(self.weights, strict=False)
        return self.bench.sync(self.weights.items())

    def checks(self, report: SyncReport, *, whole: bool) -> None:
        """Assert that the engine holds the weights, by its log-probs and its receipt, and got them as it should."""
        assert not report.failed, report.failed
        assert report.num_bytes == sum(x.nbytes for x in self.weights.values())
        if whole:
            assert report.changed_share is None and report.sent_bytes >= report.num_bytes
        else:
            assert 0 < report.changed_share < 2 * self.share and report.sent_bytes < 0.1 * report.num_bytes
        assert self.bench.largest_gap(PROMPTS[:1], 2) < LOGPROB_TOLERANCE


def begin(bench: Bench, seed: int) -> Trainer:
    """Return a trainer whose first weights the engine holds, right after a sync that brought all."""
    trainer = Trainer(bench, seed)
    bench.engine._sync.encoder._syncs = 0
    trainer.checks(trainer.send(), whole=True)
    return trainer
