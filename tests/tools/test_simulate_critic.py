"""Checks a critic's and a teacher's memory in the forecast against those of built ones, and against a count by hand."""

import dataclasses

import numpy as np
import pytest

from megatron_rl.backend.teacher_weights import TeacherWeights
from megatron_rl.config import load_config
from megatron_rl.critic import Critic
from megatron_rl.model.hf_config import model_shape
from megatron_rl.model.settings import ModelSettings
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.engine_memory import EngineMemory, gpu_needs, shortfalls
from megatron_rl.simulator.forecast import critic_memory, memory_of, with_critic, with_teacher
from megatron_rl.simulator.memory import StageMemory, beside_critic
from megatron_rl.validate.critic import critic_config
from tests.equality.rig import DEFAULTS, any_tokenizer, open_rig
from tests.reference import LAYERS, file_weights, tiny_config, tiny_model
from tests.tools.simulated_job import bytes_of, equal_samples, held_bytes, job_of

GRIDS = {"DP2, sharded": ("llama", "optimizer.distributed=true"),
         "PP2": ("qwen2_tied", "parallel.pipeline=2"),
         "TP2 beside PP2": ("qwen2_tied", "parallel.pipeline=2", "critic.parallel={pipeline: 1, tensor: 2}"),
         "EP2": ("mixtral", "parallel.expert=2", "critic.optimizer.distributed=true")}
GIVEN = ("advantage.estimator=distillation", "data.max_prompt_tokens=32", "model.dtype=float32")
DEPTH, HIDDEN = 4, 32  # of the teacher


def critic_bytes(rank: int, world: int, family: str, *overrides: str) -> tuple[int, int, int]:
    """Return the bytes of a built critic's weights, gradients and moments on a rank, once it has trained."""
    with open_rig(family, "advantage.estimator=gae", *overrides, samples=4) as rig:
        critic = Critic(rig.backend.config, hf_config=rig.backend.hf_config, weights=file_weights(rig.model))
        count = int(rig.batch.facts.response_tokens.sum())
        critic.train(rig.batch, np.ones(count, np.float32), np.zeros(count, np.float32))
        found = held_bytes(critic)
        critic.close()
    return found


def job_with_critic(family: str, world: int, *overrides: str):
    config = load_config(None, [*DEFAULTS, "model.dtype=float32", "advantage.estimator=gae", *overrides])
    hf_config = tiny_config(family, layers=LAYERS)

    def read_shape(config, degrees, **given):
        return model_shape(hf_config, ModelSettings.of(config), degrees, layer_spec="torch", **given)

    degrees = degrees_of(config.parallel, world)
    return with_critic(job_of(config, read_shape(config, degrees), degrees, equal_samples(8, 16)), read_shape)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_critics_memory_is_that_of_one_that_is_built(pool, grid: str) -> None:
    family, *overrides = GRIDS[grid]
    found = pool.run(2, critic_bytes, family, *overrides, timeout_s=120)
    stages = critic_memory(job_with_critic(family, 2, *overrides).critic)
    predicted = [stages[rank * len(stages) // 2] for rank in range(2)]
    assert [(x.weights, x.gradients) for x in predicted] == [rank[:2] for rank in found]
    assert sum(x.optimizer for x in predicted) == sum(rank[2] for rank in found)
    assert all(x.reference == 0 for x in stages)


def test_a_shared_critic_is_counted_by_hand() -> None:
    """Of float32 four bytes a weight and a gradient, eight of moments; the critic's head is one row."""
    job = job_with_critic("llama", 1)
    plan = job.plan(job.rules(), np.ones(8, bool), drops=False)
    alone = memory_of(dataclasses.replace(job, critic=None), plan)
    (stage,) = memory_of(job, plan)
    shape = job.shape
    policy = stage.weights // 4
    critic = policy - shape.padded_vocab_size * shape.hidden_size + shape.hidden_size  # an untied output matrix, a row
    assert not shape.tied_embeddings
    assert (stage.critic_weights, stage.critic_state) == (4 * critic, 4 * critic + 8 * critic)
    assert 0 < stage.critic_working < stage.activations + stage.logits  # the same samples, without logits
    assert stage.total == alone[0].total + 16 * critic
    kept = stage.kept_while_generating(takes_turns=True)
    assert kept == stage.weights + stage.critic_weights  # gradients and moments of both leave the GPU
    assert stage.kept_while_generating(takes_turns=False) == 16 * (policy + critic)


def test_stages_of_two_grids_meet_on_the_ranks_that_they_share() -> None:
    """Two stages of a policy on 4 ranks beside a critic of four: the larger of those that a stage meets counts."""

    def stages(*weights: int) -> tuple[StageMemory, ...]:
        others = dict.fromkeys([x.name for x in dataclasses.fields(StageMemory)][3:], 0)
        return tuple(StageMemory(stage=i, layers=2, weights=size, **others) for i, size in enumerate(weights))

    assert [x.total for x in beside_critic(stages(100, 200), stages(1, 2, 4, 3), 4)] == [102, 204]
    assert [x.total for x in beside_critic(stages(1, 2, 4, 3), stages(100, 200), 4)] == [101, 102, 204, 203]
    assert [x.total for x in beside_critic(stages(1), stages(100, 200), 2)] == [201]


def test_a_separate_critic_must_fit_on_its_own_gpus() -> None:
    job = job_with_critic("llama", 2, "critic.placement=separate", "critic.ranks=1")
    assert job.critic.degrees.world_size == 1 and critic_config(job.config) == job.critic.config
    (policy,) = memory_of(job, job.plan(job.rules(), np.ones(8, bool), drops=False))
    (critic,) = critic_memory(job.critic)
    assert policy.critic_weights == 0
    engine = EngineMemory(while_training=0, while_generating=0, needed=0, takes_turns=False)
    needs = gpu_needs((policy,), engine, (critic,))
    assert needs.critic == (critic.total, 0) and needs.most == max(policy.total, critic.total)
    assert shortfalls(needs, job.config.rollout, 2**40) == []
    assert "training the critic needs" in shortfalls(needs, job.config.rollout, critic.total - 1)[-1]


def teacher_bytes(rank: int, world: int, *overrides: str) -> int:
    """Return the bytes of a built teacher's weights on a rank."""
    with open_rig("qwen2_tied", *overrides) as rig:
        return bytes_of(p for chunk in TeacherWeights(rig.backend).chunks for p in chunk.parameters())


@pytest.mark.parametrize("layout", [("parallel.pipeline=2",), ("parallel.tensor=2",)], ids=["PP2", "TP2"])
def test_a_teachers_memory_is_that_of_one_that_is_built(pool, tmp_path, layout: tuple[str, ...]) -> None:
    tiny_model("llama", layers=DEPTH, hidden=HIDDEN)[1].save_pretrained(tmp_path / "teacher")
    any_tokenizer().save_pretrained(tmp_path / "teacher")
    given = (*GIVEN, *layout, f"teacher.hf_path={tmp_path / 'teacher'}")
    found = pool.run(2, teacher_bytes, *given, timeout_s=90)
    config = load_config(None, [*DEFAULTS, *given])

    def read_shape(config, degrees):
        teacher = tiny_config("llama", layers=DEPTH, hidden=HIDDEN)
        hf_config = teacher if config.model.hf_path != "" else tiny_config("qwen2_tied", layers=LAYERS)
        return model_shape(hf_config, ModelSettings.of(config), degrees, layer_spec="torch")

    degrees = degrees_of(config.parallel, 2)
    job = with_teacher(job_of(config, read_shape(config, degrees), degrees, equal_samples(8, 16)), read_shape)
    plan = job.plan(job.rules(), np.ones(8, bool), drops=False)
    with_it, without = memory_of(job, plan), memory_of(dataclasses.replace(job, teacher=None), plan)
    stages = [with_it[rank * len(with_it) // 2] for rank in range(2)]
    assert [stage.reference for stage in stages] == found and all(stage.reference == 0 for stage in without)
    assert [a.total - b.total for a, b in zip(with_it, without, strict=True)] == [x.reference for x in with_it]
