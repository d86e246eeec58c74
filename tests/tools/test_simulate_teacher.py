"""Checks a teacher's memory in the forecast against a teacher that is built, stage by stage."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_rl.backend.teacher_weights import TeacherWeights
from megatron_rl.config import load_config
from megatron_rl.model.hf_config import model_shape
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.forecast import memory_of, with_teacher
from tests.equality.rig import DEFAULTS, any_tokenizer, open_rig
from tests.reference import LAYERS, tiny_config, tiny_model
from tests.tools.simulated_job import equal_samples, job_of

GIVEN = ("advantage.estimator=distillation", "data.max_prompt_tokens=32", "model.dtype=float32")
DEPTH, HIDDEN = 4, 32  # of the teacher


def teacher_bytes(rank: int, world: int, *overrides: str) -> int:
    """Return the bytes of a built teacher's weights on a rank."""
    with open_rig("qwen2_tied", *overrides) as rig:
        chunks = TeacherWeights(rig.backend).chunks
        return sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())


@pytest.mark.parametrize("layout", [("parallel.pipeline=2",), ("parallel.tensor=2",)], ids=["PP2", "TP2"])
def test_a_teachers_memory_is_that_of_one_that_is_built(pool, tmp_path, layout: tuple[str, ...]) -> None:
    tiny_model("llama", layers=DEPTH, hidden=HIDDEN)[1].save_pretrained(tmp_path / "teacher")
    any_tokenizer().save_pretrained(tmp_path / "teacher")
    given = (*GIVEN, *layout, f"teacher.hf_path={tmp_path / 'teacher'}")
    found = pool.run(2, teacher_bytes, *given, timeout_s=90)

    config = load_config(None, [*DEFAULTS, *given])

    def read_shape(config, degrees):
        is_teacher = config.model.hf_path != ""
        hf_config = (
            tiny_config("llama", layers=DEPTH, hidden=HIDDEN)
            if is_teacher
            else tiny_config("qwen2_tied", layers=LAYERS)
        )
        return model_shape(hf_config, config, degrees, layer_spec="torch")

    degrees = degrees_of(config, 2)
    job = with_teacher(job_of(config, read_shape(config, degrees), degrees, equal_samples(8, 16)), read_shape)
    plan = job.plan(job.rules(), np.ones(8, bool), drops=False)
    with_it, without = memory_of(job, plan), memory_of(dataclasses.replace(job, teacher=None), plan)
    stages = [with_it[rank * len(with_it) // 2] for rank in range(2)]
    assert [stage.reference for stage in stages] == found and all(stage.reference == 0 for stage in without)
    assert [a.total - b.total for a, b in zip(with_it, without, strict=True)] == [x.reference for x in with_it]
