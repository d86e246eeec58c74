"""Checks the squared tokens of sliding windows against a count of the pairs that a token sees."""

import numpy as np
import pytest

from megatron_rl.model.attention.layout import lay_out
from megatron_rl.model.costs import flops_per_token
from megatron_rl.model.hf_config import read_shape
from megatron_rl.planning.tokens import SampleTokens, window_squares
from tests.reference import tiny_config

WINDOWS = (4, 0, 4, 7)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 12])
def test_squares_are_less_what_a_window_leaves_out(length: int) -> None:
    """l² counts a token's own key half; a window's first key lies half outside it, by the same integral."""
    assert window_squares(np.array([length]), ())[0] == length**2
    wanted = np.mean([length**2 - max(length - (w or length), 0) ** 2 for w in WINDOWS])
    assert window_squares(np.array([length]), WINDOWS)[0] == pytest.approx(wanted, rel=1e-12)
    # twice the pairs, each token's own among them, differ from it by less than one key per token
    pairs = np.mean([sum(min(p + 1, w or length) for p in range(length)) for w in WINDOWS])
    assert abs(2 * pairs - wanted) <= length


def test_a_shared_prompts_squares_run_once_and_flops_within_a_window_grow_with_the_length() -> None:
    """A plan's squares, a layout's, and those of the samples alone agree under windows, prompts shared or not."""
    prompts, responses = np.array([6, 6, 6, 9]), np.array([5, 1, 8, 4])
    tokens = SampleTokens(own=responses, prompt=np.array([6, 6, 6, 9]), group=np.array([0, 0, 0, 1]), windows=WINDOWS)
    own, prompt = tokens.squares()
    assert own + prompt == pytest.approx(window_squares(prompts + responses, WINDOWS), rel=1e-12)
    layout = lay_out(prompts, responses, tokens.group)
    assert layout.shared and layout.squares(WINDOWS) == pytest.approx(tokens.total(np.arange(4))[1], rel=1e-12)
    assert layout.squares(WINDOWS) < layout.squares(()) and tokens.padded(4).windows == WINDOWS
    # beyond the window each token costs window keys in a windowed layer, and all before it in a full one
    shape = read_shape(tiny_config("olmo3"), layer_spec="torch")
    assert shape.windows == (5, 0)

    def scores(length: int) -> float:
        squares = window_squares(np.array([length]), shape.windows)[0]
        return length * (flops_per_token(shape, squares / length / 2) - flops_per_token(shape, 0.0))

    per_pair = 12.0 * shape.num_heads * shape.head_dim
    full = per_pair * (200**2 - 100**2) / 2
    assert scores(200) - scores(100) == pytest.approx(full + per_pair * 5 * 100, rel=1e-9)
