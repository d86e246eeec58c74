"""A reward model's scores, gradient and export equal those of transformers' classifier, which pools by its own rule."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.config import PreferenceConfig, load_config
from megatron_rl.critic import RewardModel
from megatron_rl.distributed import topology
from megatron_rl.trainer.preference import compare_pairs, prepare_pairs
from megatron_rl.types import Sample
from tests.equality.critic_rig import reward_model
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import DEFAULTS, any_tokenizer, layers_of
from tests.equality.rows import measured
from tests.naive_pairs import RULE, naive_loss, pairs_of_one_prompt
from tests.pairwise import quick
from tests.reference import gradient_of, relative_error

SAMPLES = 8
PAIRS = PreferenceConfig(loss="bradley_terry", margin=0.2)
LAYOUTS = (*("one qwen2_tied", "DP2 qwen2_tied", "PP2 llama", "TP2 qwen2_untied", "TP2-SP qwen3"),
           *("PP2-VPP2 llama3_rope", "CP2 mistral", "PP2-DP2 qwen2_tied"))


def ended(sample: Sample) -> Sample:
    """Return the sample with the place behind its end, at which the head is read (data/solution.py)."""
    mask = np.zeros(len(sample.loss_mask) + 1, dtype=bool)
    mask[-1] = True
    return dataclasses.replace(sample, token_ids=np.append(sample.token_ids, sample.token_ids[-1]), loss_mask=mask,
                               logprobs=np.append(sample.logprobs, np.float32(0)))


def score(judge, sample: Sample) -> torch.Tensor:
    return judge(torch.from_numpy(sample.token_ids[:-1])[None]).logits[0, 0]


def naive(judge, samples: list[Sample]) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradient and loss, the mean over pairs, one pair after the other."""
    judge.zero_grad()
    total, count = 0.0, len(samples) // 2
    for i in range(0, len(samples), 2):
        loss = naive_loss(PAIRS, score(judge, samples[i]), score(judge, samples[i + 1]), 0.0, 0.0, 1, 1) / count
        loss.backward()
        total += float(loss.detach())
    return gradient_of(judge), total


def against_classifier(rank: int, world: int, family: str, overrides: tuple[str, ...], path: str) -> dict[str, float]:
    """Return the worst differences to transformers' classifier: of scores, loss, gradient and exported weights."""
    from transformers import AutoModelForSequenceClassification

    config = load_config(None, [*DEFAULTS, "sft.steps=1", "train.num_rollouts=0", *overrides])
    hf_config, judge = reward_model(family, layers_of(config))
    with contextlib.ExitStack() as held:
        held.callback(topology.destroy)
        model = RewardModel(config, hf_config=hf_config, weights=dict(judge.state_dict()))
        samples = [ended(sample) for sample in pairs_of_one_prompt(SAMPLES)]
        mine = list(range(rank, SAMPLES, world))
        batch = model.gather([samples[i] for i in mine], [i // 2 for i in mine], mine)
        scores, outcome = compare_pairs(model, batch, PAIRS)
        prepare_pairs(model, batch, outcome, RULE).accumulate(model)
        gradient = model.gradient()
        model.zero_grad()
        wanted, loss = naive(judge, samples)
        with torch.no_grad():
            scores_of_judge = np.array([float(score(judge, sample)) for sample in samples])
        model.save_hugging_face(path, any_tokenizer())
        torch.distributed.barrier()
        loaded, report = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
        found = {"scores": float(np.abs(scores.sums - scores_of_judge).max()),
                 "loss": abs(float(outcome.losses.mean()) - loss) / loss,
                 "gradient": relative_error(gradient, wanted),
                 "lost in the export": float(len(report["missing_keys"]) + len(report["unexpected_keys"])),
                 "export": max(float((loaded.state_dict()[k] - x).abs().max()) for k, x in judge.state_dict().items())}
        held.pop_all()
        model.close(leave_world=False)
        return found


@pytest.mark.parametrize("layout", quick(LAYOUTS, *LAYOUTS[1:2], *LAYOUTS[4:7]))
def test_scores_gradient_and_export_equal_a_sequence_classifiers(pool, tmp_path, layout):
    for found in measured(pool, layout, against_classifier, tmp_path / "judge"):
        assert max(found.values()) < TOLERANCE, found
        assert found["export"] == found["lost in the export"] == 0, found
