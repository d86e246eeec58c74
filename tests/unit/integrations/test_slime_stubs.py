"""Stubs in slime's train data: the gradient by its documented formula, and what is kept, cut, counted and refused."""

import copy
import logging
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.integrations import slime

VOCABULARY = 13
GROUPS = (0, 0, 0, 0, 1, 1, 2, 2, 2)


def train_data(rewards=(0.0, 0.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.7, -0.7), seed: int = 0) -> dict:
    """Return nine samples of three groups; samples 7 and 8 are one rollout, 5 has no loss token, masks have holes."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, num: int = 1) -> list[int]:
        return torch.randint(low, high, (num,), generator=random).tolist()

    lengths = [(draw(1, 6)[0], draw(2, 9)[0]) for _ in rewards]
    masks = [[1, *draw(0, 2, response - 1)] for _, response in lengths]
    masks[5] = [0] * len(masks[5])
    rollout_ids = [0, 1, 2, 3, 4, 5, 6, 7, 7]
    return {"tokens": [draw(0, VOCABULARY, prompt + response) for prompt, response in lengths],
            "response_lengths": [response for _, response in lengths],
            "rewards": list(rewards),
            "raw_reward": list(rewards),
            "truncated": draw(0, 2, len(rewards)),
            "sample_indices": list(range(len(rewards))),
            "rollout_ids": rollout_ids,
            "loss_masks": masks,
            "rollout_mask_sums": [*map(sum, masks[:7]), sum(masks[7] + masks[8]), sum(masks[7] + masks[8])],
            "rollout_log_probs": [[-0.5] * response for _, response in lengths]}


def gradient(data: dict, *, per_token: bool) -> torch.Tensor:
    """Return the gradient of slime 0.3.1's loss as its sources document it, sample by sample, in double.

    Mean: Σ_i Σ_t mask·pg / max(rollout_mask_sums_i, 1) / rollouts (cp_utils.py:71-79, loss.py:1342-1348).
    Tokens: Σ_i Σ_t mask·pg / Σ_i max(Σ_t mask, 1) (cp_utils.py:81-87, loss.py:1315; Megatron-Core divides).
    """
    random = torch.Generator().manual_seed(1)
    sizes = ((VOCABULARY, 4), (4, VOCABULARY))
    embedding, head = (torch.randn(n, generator=random, dtype=torch.float64) for n in sizes)
    embedding.requires_grad_(), head.requires_grad_()
    loss, tokens = 0.0, 0
    for row, ids in enumerate(map(torch.tensor, data["tokens"])):
        response, mask = data["response_lengths"][row], torch.tensor(data["loss_masks"][row])
        seen = embedding[ids].cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        log_probs = (seen @ head).log_softmax(-1)[:-1].gather(1, ids[1:, None])[-response:, 0]
        term = (-data["rewards"][row] * (log_probs - log_probs.detach()).exp() * mask).sum()
        loss = loss + (term if per_token else term / max(data["rollout_mask_sums"][row], 1))
        tokens += max(int(mask.sum()), 1)
    loss = loss / (tokens if per_token else len(set(data["rollout_ids"])))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, (embedding, head))])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_gradient_with_stubs_equals_the_whole_batchs(per_token: bool, seed: int) -> None:
    whole = train_data(seed=seed)
    cut, counts = slime.with_stubs(whole, GROUPS, per_token=per_token)
    wanted = gradient(whole, per_token=per_token)
    assert wanted.abs().max() > 1e-3 and counts.executed_tokens < counts.dense_tokens
    torch.testing.assert_close(gradient(cut, per_token=per_token), wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("per_token", [False, True])
def test_only_samples_without_signal_are_cut(per_token: bool) -> None:
    """Every field of every other sample stays; the given data too; counts are a loop's."""
    whole = train_data()
    before = copy.deepcopy(whole)
    cut, counts = slime.with_stubs(whole, GROUPS, per_token=per_token)
    assert whole == before and cut.keys() == whole.keys()
    stubs = [0, 1, 2, 3, 5, 6]
    for name, values in cut.items():
        for row in range(len(GROUPS)):
            if row not in stubs or name in slime.KEPT_FIELDS:
                assert values[row] == whole[name][row], (name, row)
    for row in stubs:
        prompt = len(whole["tokens"][row]) - whole["response_lengths"][row]
        assert cut["tokens"][row] == whole["tokens"][row][prompt - 1 : prompt + 1]
        assert cut["response_lengths"][row] == 1 == len(cut["rollout_log_probs"][row])
        assert cut["loss_masks"][row] == [sum(whole["loss_masks"][row]) if per_token else 0]
    dense = sum(map(len, whole["tokens"]))
    executed = dense - sum(len(whole["tokens"][row]) - 2 for row in stubs)
    counted = slime.Stubbed(groups=3, dead_groups=1, equal_groups=0, samples=9, stubs=6, dense_tokens=dense,
                            executed_tokens=executed)
    assert counts == counted


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e-12])
def test_what_is_not_zero_is_signal(reward: float) -> None:
    """A group of equal rewards whose advantages a rounded mean made is not cut, but counted."""
    rewards = (reward,) * 4 + (0.0,) * 5
    cut, counts = slime.with_stubs(train_data(rewards), GROUPS, per_token=False)
    assert cut["tokens"][:4] == train_data(rewards)["tokens"][:4]
    assert (counts.dead_groups, counts.equal_groups, counts.stubs) == (2, 1, 5)


def test_nothing_but_stubs_keeps_every_sample_and_samples_of_nobody_are_an_error() -> None:
    """A rollout without signal keeps its samples and ids, so that every step and rank has something to run."""
    with pytest.raises(ConfigError, match="--custom-convert-samples-to-train-data-path"):
        slime.convert_samples(arguments(), [SimpleNamespace()])
    cut, counts = slime.with_stubs(train_data((0.0,) * 9), GROUPS, per_token=False)
    assert [len(tokens) for tokens in cut["tokens"]] == [2] * 9 and cut["loss_masks"] == [[0]] * 9
    assert cut["rollout_ids"] == train_data()["rollout_ids"] and counts.dead_groups == 3


def test_a_sample_without_prompt_or_response_stays_and_kept_tokens_of_nucleus_sampling_are_cut() -> None:
    data = train_data()
    data["tokens"][0] = data["tokens"][0][-data["response_lengths"][0] :]
    data["response_lengths"][1], data["loss_masks"][1], data["rollout_log_probs"][1] = 0, [], []
    cut, counts = slime.with_stubs(data, GROUPS, per_token=False)
    assert cut["tokens"][:2] == data["tokens"][:2] and counts.stubs == 4
    data = train_data()
    data["rollout_top_p_token_offsets"] = [list(range(0, 3 * n + 1, 3)) for n in data["response_lengths"]]
    data["rollout_top_p_token_ids"] = [torch.arange(3 * n) for n in data["response_lengths"]]
    cut, _ = slime.with_stubs(data, GROUPS, per_token=False)
    assert cut["rollout_top_p_token_offsets"][0] == [0, 3] and cut["rollout_top_p_token_ids"][0].tolist() == [0, 1, 2]
    assert len(cut["rollout_top_p_token_ids"][4]) == 3 * data["response_lengths"][4]


def arguments(**changes) -> SimpleNamespace:
    settled = {"advantage_estimator": "grpo", "use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coef": 0.0}
    return SimpleNamespace(**settled | {"loss_type": "policy_loss", "moe_aux_loss_coeff": 0.0} | changes)


OBSTACLES = (
    *({"advantage_estimator": "ppo"}, {"advantage_estimator": "reinforce_plus_plus_baseline"}),
    *({"use_kl_loss": True, "kl_loss_coef": 0.001}, {"entropy_coef": 0.01}, {"kl_coef": 0.1}, {"use_opd": True}),
    *({"use_critic": True}, {"normalize_advantages": True}, {"loss_type": "custom_loss"}, {"moe_aux_loss_coeff": 0.01}),
    *({"attention_dropout": 0.1}, {"qkv_format": "bshd"}),
)


def test_what_allows_no_skip_is_named() -> None:
    for changes in OBSTACLES:
        *_, (name, value) = changes.items()
        assert slime.obstacles_of(arguments(**changes)) == [f"{name}={value}"]
    for name, value, why in (
        ("custom_tis_function_path", "mine.f", "not known"),
        ("use_rollout_routing_replay", True, "not tried"),
    ):
        assert slime.obstacles_of(arguments(**{name: value})) == [f"{name}={value} ({why})"]
    # harmless settings are none
    assert slime.obstacles_of(arguments()) == []
    assert slime.obstacles_of(arguments(use_kl_loss=True, kl_coef=0.0, custom_tis_function_path=None, fp8=None)) == []
    assert slime.field_obstacles(train_data()) == []
    assert slime.field_obstacles(train_data() | {"multimodal_train_inputs": []}) == [
        "the field multimodal_train_inputs (not tried)"
    ]


def test_the_log_says_what_is_on_whenever_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    slime._say.cache_clear()
    for obstacles in ((), (), ("use_opd=True",), ("use_opd=True",)):
        slime._say(obstacles)
    first, second = caplog.messages
    assert "is ON" in first and "drops NOTHING" in second and "use_opd=True" in second
