"""Checks backend/packing.py and attention/packed.py: sequences see no other, and loss tokens are in their places."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.backend.packing import PackedAhead
from megatron_rl.model.attention import packed as attention
from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.packed import PackedSequences, TorchAttention, pack
from megatron_rl.model.attention.spans import ContextShard, context_positions
from megatron_rl.types import MicroBatch, Sample
from tests.pairwise import pairwise
from tests.reference import make_samples
from tests.unit.backend.packed import CPU, attention_config, run_pack

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
GIVEN = ("targets", "sequences", "advantages", "weights", "old_logprobs", "reference_logprobs", "rollout_logprobs")
OF_LOSS = ("loss_positions", "flat", *GIVEN)


@pytest.mark.parametrize("context", [ContextShard(), ContextShard(rank=1, size=2)])
@SETTINGS
@given(lengths=st.lists(st.integers(1, 10).map(lambda chunks: 4 * chunks), min_size=1, max_size=12))
def test_bounds_for_transformer_engine_are_those_of_adding_up(context: ContextShard, lengths: list[int]) -> None:
    """Of whole sequences, and no spans. Under context parallelism the padded bounds are the same tensor."""
    packed = pack(Layout.of(tuple(lengths)), CPU, context, for_transformer_engine=True)
    assert packed.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv and packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == packed.max_seqlen_kv == max(lengths) and packed.qkv_format == "thd"
    padded = packed.cu_seqlens_q if context.size > 1 else None
    assert packed.cu_seqlens_q_padded is padded and packed.cu_seqlens_kv_padded is padded
    assert packed.spans == () and packed.key_order is None and len(packed.position_ids) == sum(lengths) // context.size


def make_attention(scale: float | None = None) -> TorchAttention:
    return TorchAttention(attention_config(), 1, None, "self", softmax_scale=scale)


def make_qkv(tokens: int, dtype: torch.dtype, heads: int = 4, groups: int = 2) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(tokens, n, 8, generator=random, dtype=dtype).requires_grad_()
                 for n in (heads, groups, groups))


def attend(qkv: tuple[torch.Tensor, ...], lengths: tuple[int, ...], scale: float | None = None) -> torch.Tensor:
    return make_attention(scale)(*qkv, None, packed_seq_params=pack(Layout.of(lengths), CPU))


@pytest.mark.parametrize("lengths, groups, scale",
                         pairwise([(7,), (1, 1), (5, 9, 4, 9, 1), (16, 12, 13, 3)], [1, 2, 4], [None, 0.5]))
def test_packed_attention_equals_each_sequence_alone(lengths: tuple[int, ...], groups: int,
                                                     scale: float | None) -> None:
    """Output and gradients, with grouped queries too; in double, they differ by the order of additions alone."""
    qkv = make_qkv(sum(lengths), torch.float64, groups=groups)
    coefficient = torch.randn(sum(lengths), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = attend(qkv, lengths, scale)
    alone = []
    for part in zip(*(x.split(lengths) for x in qkv), strict=True):
        q, k, v = (x.repeat_interleave(4 // x.shape[1], dim=1).transpose(0, 1) for x in part)
        scores = q @ k.transpose(1, 2) * (scale or 8**-0.5)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        alone.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    wanted = torch.cat(alone)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    for x, y in zip(*(torch.autograd.grad((o * coefficient).sum(), qkv) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_packed_attention_equals_sdpa_bit_by_bit_and_refuses_what_is_not_packed() -> None:
    qkv = make_qkv(12, torch.float32)
    q, k, v = (x.view(2, 6, *x.shape[1:]).transpose(1, 2) for x in qkv)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(12, -1)
    assert torch.equal(attend(qkv, (6, 6)), wanted)
    with pytest.raises(TypeError, match="PackedSequences .* not NoneType"):
        make_attention()(*make_qkv(3, torch.float32), None, packed_seq_params=None)


def attend_split(qkv: tuple[torch.Tensor, ...], lengths: tuple[int, ...], size: int) -> torch.Tensor:
    """Return the output of ``size`` context ranks for the same tokens, in order; the gather is a concatenation."""
    held = [context_positions(lengths, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(held).tolist()) == list(range(sum(lengths)))
    everyone = torch.stack(qkv[1:], dim=1)[np.concatenate(held)]
    output = torch.empty(sum(lengths), qkv[0].shape[1] * qkv[0].shape[2], dtype=qkv[0].dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention._GatherContext, "apply", lambda local, group: everyone)
        for rank, mine in enumerate(held):
            packed = pack(Layout.of(lengths), CPU, ContextShard(rank=rank, size=size))
            output[mine] = make_attention()(*(x[mine] for x in qkv), None, packed_seq_params=packed)
    return output


@pytest.mark.parametrize("context", [1, 2])
def test_a_neighbour_changes_nothing(context: int) -> None:
    """Other numbers in one sequence, NaN among them, change no bit of any other sequence's output and gradient."""
    lengths = (8, 4, 8, 4)
    place = torch.arange(24)
    outside = (place < 8) | (place >= 12)  # all but the second sequence

    def run(disturb: float):
        q, k, v = (x.detach().clone() for x in make_qkv(24, torch.float32))
        for x in (q, k, v):
            x[8:12] += disturb
            x.requires_grad_()
        output = (attend((q, k, v), lengths) if context == 1 else attend_split((q, k, v), lengths, context))[outside]
        return output.detach(), *(g[outside] for g in torch.autograd.grad(output.square().sum(), (q, k, v)))

    undisturbed = run(0.0)
    for disturb in (1.0, 1e4, float("nan")):
        assert all(map(torch.equal, undisturbed, run(disturb)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", [(8,), (16, 8), (8, 24, 16, 24, 40)])
def test_context_split_attention_equals_whole(lengths: tuple[int, ...], size: int) -> None:
    """Attention of zig-zag chunks against gathered keys equals that of the whole, output and gradients, in double."""
    qkv = make_qkv(sum(lengths), torch.float64)
    coefficient = torch.randn(sum(lengths), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, wanted = attend_split(qkv, lengths, size), attend(qkv, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    for x, y in zip(*(torch.autograd.grad((o * coefficient).sum(), qkv) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_context_ranks_hold_a_chunk_from_each_end_and_refuse_what_does_not_split() -> None:
    assert context_positions((4, 8), 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert context_positions((4, 8), 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="6 tokens does not split in 2 x 2 chunks; pad it to a multiple of 4"):
        context_positions((4, 6), 0, 2)


@SETTINGS
@given(seed=st.integers(0, 50), size=st.sampled_from([1, 2, 4]), count=st.integers(1, 6), filler=st.booleans())
def test_context_ranks_share_out_the_micro_batch(seed: int, size: int, count: int, filler: bool) -> None:
    """Every token and every loss token is on exactly one rank, with the numbers that it has on one rank alone."""
    samples = make_samples(count, seed=seed)
    chosen = np.random.default_rng(seed).permutation(count).tolist()
    given = dict(pad_multiple=2 * size, filler=filler)
    whole = run_pack(samples, chosen, **given)
    parts = [run_pack(samples, chosen, context=ContextShard(rank=r, size=size), **given) for r in range(size)]
    tokens, places = torch.empty_like(whole.tokens[0]), torch.empty_like(whole.packed.position_ids)
    for part in parts:
        tokens[part.positions], places[part.positions] = part.tokens[0], part.packed.position_ids
        # of whole sequences: Transformer Engine divides by CP itself
        assert part.packed.layout.lengths == whole.packed.layout.lengths
    assert torch.equal(tokens, whole.tokens[0]) and torch.equal(places, whole.packed.position_ids)
    at = np.concatenate([part.positions[part.loss_positions.numpy()] for part in parts])
    order, wanted = np.concatenate([part.flat for part in parts]).argsort(), whole.flat.argsort()
    assert at[order].tolist() == whole.loss_positions[wanted].tolist()
    for name in GIVEN:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts])[order], getattr(whole, name)[wanted]), (
            name
        )


@SETTINGS
@given(seed=st.integers(0, 50), pad_multiple=st.sampled_from([1, 2, 4, 8]), count=st.integers(1, 6))
def test_microbatch_equals_naive(seed: int, pad_multiple: int, count: int) -> None:
    """Token by token, with samples in any order, ragged, and with a masked token in mid-response."""
    samples = make_samples(8, seed=seed)
    chosen = np.random.default_rng(seed).permutation(8)[:count].tolist()
    found = run_pack(samples, chosen, pad_multiple=pad_multiple, pad_token=98)
    tokens, position_ids, lengths, wanted = [], [], [], []
    flat_starts = np.cumsum([0] + [len(s.loss_mask) for s in samples])
    for slot, i in enumerate(chosen):
        s, start = samples[i], len(tokens)
        padded = len(s.token_ids) + -len(s.token_ids) % pad_multiple
        tokens += s.token_ids.tolist() + [98] * (padded - len(s.token_ids))
        position_ids += list(range(padded))
        lengths.append(padded)
        for t in range(len(s.loss_mask)):
            if s.loss_mask[t]:
                place, flat = start + s.prompt_tokens + t, int(flat_starts[i]) + t
                given = tokens[place], slot, i + 0.5, i + 1.0, -flat, -1000 - flat, s.logprobs[t].item()
                wanted.append((place - 1, flat, *given))
    assert found.packed.layout.lengths == tuple(lengths) and isinstance(found.packed, PackedSequences)
    assert found.tokens.tolist() == [tokens] and found.packed.position_ids.tolist() == position_ids
    assert found.num_sequences == count
    assert list(zip(*(getattr(found, name).tolist() for name in OF_LOSS), strict=True)) == wanted
    assert found.advantages.dtype == found.weights.dtype == found.old_logprobs.dtype == torch.float32
    assert found.loss_positions.dtype == found.targets.dtype == found.sequences.dtype == torch.int64


def test_masked_token_in_mid_response_is_read_but_not_trained() -> None:
    """A tool's token stands in the input and is never predicted. The next token is predicted from it."""
    sample = Sample(sample_id="s", prompt_tokens=2, token_ids=np.array([10, 11, 20, 21, 22]),
                    loss_mask=np.array([True, False, True]), logprobs=np.array([-1.0, -2.0, -3.0], dtype=np.float32))
    found = run_pack([sample], [0])
    assert found.tokens.tolist() == [[10, 11, 20, 21, 22]]
    assert found.loss_positions.tolist() == [1, 3] and found.flat.tolist() == [0, 2]
    assert found.targets.tolist() == [20, 22]
    assert found.old_logprobs.tolist() == [-0.0, -2.0] and found.rollout_logprobs.tolist() == [-1.0, -3.0]


def test_filler_runs_the_same_tokens_and_has_no_loss_token() -> None:
    samples = make_samples(4, seed=2)
    real, filler = run_pack(samples, [1, 3]), run_pack(samples, [1, 3], filler=True)
    assert torch.equal(filler.tokens, real.tokens) and torch.equal(filler.packed.position_ids, real.packed.position_ids)
    for name in ("loss_positions", "targets", "sequences", "old_logprobs", "advantages", "weights"):
        assert len(getattr(filler, name)) == 0 < len(getattr(real, name))


def test_a_sample_without_loss_token_packs_and_a_logprob_pass_has_no_loss_inputs() -> None:
    samples = make_samples(2, seed=1)
    silent = dataclasses.replace(samples[1], loss_mask=np.zeros(len(samples[1].loss_mask), dtype=bool))
    found = run_pack([samples[0], silent], [1])
    assert found.targets.shape == found.weights.shape == (0,) and found.targets.dtype == torch.int64
    assert found.tokens.tolist() == [silent.token_ids.tolist()]
    found = run_pack(make_samples(2), [0, 1], inputs=None)
    assert found.advantages is found.weights is found.old_logprobs is None and len(found.targets) > 0


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_stage_gets_what_it_needs(first: bool, last: bool) -> None:
    """Tokens go to the first and loss rows to the last; one between holds no rows, and the others' positions."""
    samples, given = make_samples(4, seed=3), dict(pad_multiple=4, needs_tokens=first, needs_loss=last)
    whole = run_pack(samples, [2, 0], pad_multiple=4)
    inputs = {} if first or last else {"inputs": None}
    found = run_pack(samples, [2, 0], with_rows=first or last, **inputs, **given)
    assert torch.equal(found.packed.position_ids, whole.packed.position_ids)
    assert found.packed.layout.lengths == whole.packed.layout.lengths and (found.tokens is not None) == first
    for name in OF_LOSS:
        assert (getattr(found, name) is not None) == last, name


def test_packed_ahead_is_one_ahead_once_each_and_raises_where_the_microbatch_is_asked_for() -> None:
    """While k runs, k + 1 is packed and k + 2 is not; a second pass (another chunk) gets the same objects."""
    asked: list[int] = []
    plans = [MicroBatch(samples=np.array([i]), filler=False) for i in range(4)]
    with ThreadPoolExecutor(max_workers=1) as packer:
        ahead = PackedAhead(plans, lambda m: asked.append(int(m.samples[0])) or object(), packer)
        first = []
        for k, packed in enumerate(ahead):
            first.append(packed)
            packer.submit(int).result()  # the thread has done all it was asked for
            assert asked == list(range(min(k + 2, 4)))
        assert len(ahead) == 4 and asked == [0, 1, 2, 3]
        assert [a is b for a, b in zip(first, ahead, strict=True)] == [True] * 4
    plans = [MicroBatch(samples=np.array([i]), filler=False) for i in range(2)]

    def pack(microbatch: MicroBatch) -> object:
        if microbatch.samples[0] == 1:
            raise KeyError("row 1")
        return object()

    with ThreadPoolExecutor(max_workers=1) as packer:
        ahead = iter(PackedAhead(plans, pack, packer))
        next(ahead)
        with pytest.raises(KeyError, match="row 1"):
            next(ahead)
        assert not PackedAhead([], pack, packer)
