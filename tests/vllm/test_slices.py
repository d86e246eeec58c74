"""Workers of a tensor-parallel engine load slices from the sender's memory, and together check all of its bytes."""

from collections.abc import Iterator

import pytest
import torch

from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer
from megatron_rl.weights.bucket_digest import NUM_PARTS, part_bounds
from tests.pairwise import quick
from tests.vllm.rig import LOGPROB_TOLERANCE, Bench, make_prompts, running
from tests.vllm.trainer import DELTA, begin

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

PROMPTS = make_prompts(5, 40, 70)
LARGE = {"channel": "shared_memory", "bucket_bytes": 1 << 20}  # all weights of the small model in one half


@pytest.fixture(scope="module")
def pair(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine of two workers, each with one head and half of every layer."""
    root = tmp_path_factory.mktemp("pair")
    with running(inputs, root, "qwen3", "rollout.tensor_parallel=2", *DELTA, tied=False, ranks=2) as started:
        yield started


def test_two_workers_hold_the_whole_models_weights(pair):
    """Log-probs are Hugging Face's after syncs whose buckets end within a layer, at its end, or hold all layers."""
    for seed, bucket_bytes in enumerate((12_000, 12_000, 60_000, 60_000, 1 << 20, 1 << 20)):
        pair.load(seed, channel="shared_memory", bucket_bytes=bucket_bytes)
        assert pair.largest_gap(PROMPTS) < LOGPROB_TOLERANCE, bucket_bytes


def test_two_workers_hold_the_trainers_weights_by_changes_alone(pair):
    trainer = begin(pair, 7)
    for _ in range(3):
        trainer.checks(trainer.step(), whole=False)


@pytest.mark.parametrize("part", quick(range(NUM_PARTS), 0, NUM_PARTS - 1))
def test_a_byte_that_changed_anywhere_is_seen_by_one_of_the_workers(pair, monkeypatch, part):
    message = BucketBuffer.message

    def flipped(buffer: BucketBuffer, **given: object) -> dict[str, object]:
        content = message(buffer, **given)
        buffer.segment.bytes[part_bounds(buffer.used)[part]] ^= 1
        return content

    with monkeypatch.context() as planted:
        planted.setattr(BucketBuffer, "message", flipped)
        report = pair.sync(pair.weights(3).items(), **LARGE)
    (reason,) = report.failed.values()
    assert f"its part {part} of {NUM_PARTS} has another digest" in reason
    pair.load(4, **LARGE)
    assert pair.largest_gap(PROMPTS) < LOGPROB_TOLERANCE


class Narrowing(torch.nn.Module):
    """A layer of two weights, of which a worker takes the upper half of the rows; ``seen`` are the tensors it read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False) for _ in range(2))
        self.seen: list[torch.Tensor] = []
        for weight in (self.first, self.second):
            weight.weight_loader = self._load

    def _load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if param.device.type != "meta":  # where vLLM only counts the values that a loader takes
            self.seen.append(loaded_weight)
        param.data.copy_(loaded_weight.narrow(0, 0, 2))


def test_only_tensors_of_unfinished_layers_are_copied():
    """A layer that a bucket holds whole reads the sender's memory; another's tensors outlive the bucket as copies."""
    from vllm.model_executor.model_loader.reload import layerwise

    from megatron_rl.rollout.weight_sync.engine_model import keep_waiting

    model = torch.nn.ModuleList([Narrowing(), Narrowing()])
    layerwise.record_metadata_for_reloading(model)
    layerwise.initialize_layerwise_reload(model)
    bucket = torch.arange(3 * 12, dtype=torch.float32)
    weights = [bucket[12 * k : 12 * (k + 1)].view(4, 3) for k in range(3)]
    kept = [weight[:2].clone() for weight in weights]
    for layer, name, weight in zip((0, 0, 1), ("first", "second", "first"), weights, strict=True):
        parameter = getattr(model[layer], name)
        parameter.weight_loader(parameter, weight)
    keep_waiting(model, bucket.view(torch.uint8), torch.device("cpu"))
    bucket.fill_(-1.0)  # the sender's next bucket
    last = model[1].second
    last.weight_loader(last, torch.full((4, 3), 7.0))
    layerwise.finalize_layerwise_reload(model, None)
    assert torch.equal(model[0].first, kept[0]) and torch.equal(model[0].second, kept[1])
    assert torch.equal(model[1].first, kept[2]) and torch.equal(model[1].second, torch.full((2, 3), 7.0))
    memory = bucket.untyped_storage().data_ptr()
    assert [x.untyped_storage().data_ptr() == memory for layer in model for x in layer.seen] == [True] * 2 + [False] * 2
