"""backend/gradient_norm.py: the norm of large gradients is float64's, and Megatron-Core's clipping takes it."""

import pytest
import torch

from megatron_rl.backend.gradient_norm import PIECE, l2_norm, use_accurate_norm

from megatron.core.optimizer import clip_grads  # isort: skip


def gradients(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(size, generator=generator) * 1e-4).to(dtype) for size in sizes]


def norm_of(tensors: list[torch.Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1,), (PIECE - 1,), (PIECE,), (PIECE + 1, 0, 3), (1 << 22, 5)],
                         ids=lambda sizes: str(max(sizes)))
def test_norm_equals_float64s(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = gradients(*sizes, dtype=dtype)
    assert float(l2_norm(tensors)) == pytest.approx(norm_of(tensors), rel=1e-7 if dtype is torch.float32 else 1e-6)


def test_shape_and_cut_make_no_difference_and_what_is_not_finite_stays_so() -> None:
    (whole,) = gradients(1 << 20)
    parts = [part.t() for part in whole.view(1024, 1024).split(341)]  # rows for three ranks, not contiguous
    assert float(l2_norm(parts)) == pytest.approx(float(l2_norm([whole])), rel=1e-7)
    assert torch.isinf(l2_norm([torch.tensor([1.0, float("inf")])])) and float(l2_norm([])) == 0.0
    assert torch.isnan(l2_norm([torch.cat([torch.ones(PIECE), torch.tensor([float("nan")])])]))


def test_megatrons_clipping_takes_it() -> None:
    """Megatron-Core's own fallback is 1e-4 away on these tensors (torch 2.13.0, CPU)."""
    tensors = gradients(1 << 22, 1 << 21)
    use_accurate_norm()
    overflow = torch.zeros(1, dtype=torch.int)
    found, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [tensors], False)
    assert found.shape == (1,) and found.dtype == torch.float32
    assert found.item() == pytest.approx(norm_of(tensors), rel=1e-6)
