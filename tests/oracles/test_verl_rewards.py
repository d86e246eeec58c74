"""Checks that verl's compute_score gives here the rewards that verl's own managers make of it on the same samples."""

import copy
from contextlib import closing

import numpy as np
import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.reward import Reward
from megatron_rl.types import Prompt, Rollout
from tests.oracles.batch import MISSING

pytest.importorskip("verl", reason=MISSING)
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils.import_utils import load_extern_object
from verl.workers.reward_manager.batch import BatchRewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager

# What verl's own functions tell apart: a right answer in their format, a wrong one, one without the format, nothing.
SAID = ("#### 72", "so 5\n#### 7", "\\boxed{72}", "", "x #### 1,072")
OWN = """
def one(data_source, solution_str, ground_truth, extra_info=None):
    extra_info["seen"] = extra_info.get("seen", 0) + 1
    known = [extra_info["index"], extra_info["num_turns"] is None, len(extra_info["rollout_reward_scores"])]
    return {"score": len(solution_str) + known[0] + 10 * known[1] + 100 * known[2], "acc": data_source == "x"}
"""


def rows() -> list[dict]:
    sources = ("openai/gsm8k", "lighteval/MATH", "math_dapo", "openai/gsm8k", "math_dapo")
    return [
        {
            "data_source": source,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": number, "split": "train"},
        }
        for number, (source, truth) in enumerate(zip(sources, ("72", "72", "72", "72", "1072"), strict=True))
    ]


class Letters:
    """Decodes a character for each token, as verl's managers ask for it."""

    eos_token = "\0"

    def decode(self, token_ids, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids)).replace("\0", "") if skip_special_tokens else ""


def theirs(manager, function) -> list[float]:
    """Return the rewards of one of verl's managers on every answer to every row."""
    pairs = [(row, text) for row in rows() for text in SAID]
    width = max(map(len, SAID)) + 1
    responses, mask = torch.zeros(len(pairs), width, dtype=torch.long), torch.zeros(len(pairs), 1 + width)
    for number, (_, text) in enumerate(pairs):
        responses[number, : len(text)] = torch.tensor([*map(ord, text)], dtype=torch.long)
        mask[number, : len(text) + 2] = 1  # a prompt of one token, and the end of the response
    batch = {"prompts": torch.ones(len(pairs), 1, dtype=torch.long), "responses": responses,
             "attention_mask": mask.long()}  # fmt: skip
    columns = {}
    for key in rows()[0]:
        columns[key] = np.empty(len(pairs), dtype=object)
        columns[key][:] = [copy.deepcopy(row[key]) for row, _ in pairs]
    data = DataProto(batch=TensorDict(batch, batch_size=len(pairs)), non_tensor_batch=columns)
    return manager(Letters(), 0, compute_score=function)(data).sum(-1).tolist()


def ours(name: str, num_workers: int) -> list[float]:
    found = []
    for number, row in enumerate(rows()):
        prompt = Prompt(prompt_id=f"{number}@0", text="p", token_ids=(1,), columns=row)
        for index, text in enumerate(SAID):
            fields = {"logprobs": (), "finish_reason": "stop", "weight_versions": ((0, 0),)}
            found.append(Rollout(prompt=prompt, sample_index=index, response_ids=(), text=text, **fields))
    with closing(Reward(RewardConfig(functions=(name,), num_workers=num_workers))) as reward:
        return [score.total for score in reward.score(found)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rewards_equal_verls_managers(tmp_path, num_workers: int) -> None:
    (tmp_path / "own.py").write_text(OWN)
    default = "verl.utils.reward_score:default_compute_score"
    batched = "verl.utils.reward_score.math_batch:compute_score_batched"
    for name, manager in ((default, NaiveRewardManager), (batched, BatchRewardManager),
                          (f"{tmp_path}/own.py:one", NaiveRewardManager)):  # fmt: skip
        module, _, attribute = name.rpartition(":")
        place = module if module.endswith(".py") else f"pkg://{module}"
        expected = theirs(manager, load_extern_object(place, attribute))
        assert ours(name, num_workers) == pytest.approx(expected, abs=0), name
        assert len(set(expected)) > 1
