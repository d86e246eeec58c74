"""The plug-in for verl against verl's own Megatron engine, on a thin model (tests/oracles/verl_rig.py)."""

import functools
import logging
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.distributed import platform  # noqa: F401  (before verl brings megatron.core)
from megatron_rl.errors import ConfigError
from tests.equality.layouts import TOLERANCE
from tests.oracles.batch import MISSING
from tests.pairwise import quick
from tests.patience import patient
from tests.workers.pool import Pool

algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=MISSING)

from verl.utils.metric import Metric  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

from megatron_rl.integrations import verl as plugin  # noqa: E402
from megatron_rl.integrations import verl_engine  # noqa: E402
from megatron_rl.integrations.verl_rows import EXACT_LOSS_MODES, Rows, loss_obstacles, model_obstacles, rows_of  # noqa: E402  # noqa: E402
from tests.oracles import verl_rig as rig  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MIXTURE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0}
# the last is verl's way under context parallelism
LAYOUTS = ({}, {"pipeline": 2}, {"tensor": 2}, {"pipeline": 2, "virtual": 2}, {"expert": 2, "transformer": MIXTURE})
LAYOUTS += ({"transformer": {"calculate_per_token_loss": True}},)
NUM_ROWS = 8
# which rows are dead: some of both ranks', all of one rank's, all but one or none of each; no row
DEAD = ({2, 3, 4, 7}, {4, 5, 6, 7}, {0, 2, 3, 4, 6, 7}, set())


def values(metrics: dict) -> dict[str, float]:
    return {name: value.aggregate() for name, value in metrics.items() if isinstance(value, Metric)}


def gradient(engine, data, loss) -> tuple[dict[str, torch.Tensor], dict, int]:
    """Return one mini-batch's reduced gradients, its output, and the micro-batches that ran."""
    engine.optimizer_zero_grad()
    engine.num_forwards = 0
    output = engine.forward_backward_batch(data, loss)
    return engine.gradients(), output, engine.num_forwards


def differences(rank: int, world: int, **layout) -> list[tuple]:
    """Compare both engines' gradients over reductions, dead rows, cuts and kinds of tensors."""
    own, skipping = rig.build(rig.Own, **layout), rig.build(rig.Skipping, **layout)
    found = []
    for index, mode in enumerate(MODES):
        for number, dead in enumerate(DEAD):
            # counting routed tokens, verl 0.9.1 adds them up in the offsets of jagged rows themselves, on a CPU alone
            counts = "calculate_per_token_loss" in layout.get("transformer", {})
            dynamic, jagged = (index + number) % 2 == 0, (index + number) % 3 == 0 and not counts
            loss = rig.loss_of(loss_agg_mode=mode, loss_scale_factor=20)
            rows, cut = rig.padded_rows(NUM_ROWS, dead, seed=index), dict(dynamic=dynamic, jagged=jagged)
            wanted, _, all_of = gradient(own, rig.mini_batch(rows, **cut), loss)
            got, output, ran = gradient(skipping, rig.mini_batch(rows, **cut), loss)
            metrics = values(output.get("metrics", {}))
            found.append((mode, number, rig.largest_difference(got, wanted), all_of, ran, metrics))
    return found


@pytest.mark.parametrize("layout", quick(LAYOUTS, {}, {"pipeline": 2}, LAYOUTS[4]), ids=str)
def test_gradient_equals_verls_own(pool: Pool, layout: dict) -> None:
    """The gradient equals verl's own in every loss_agg_mode, and fewer micro-batches run."""
    for rank in pool.run(2, differences, timeout_s=120, **layout):
        assert max(row[2] for row in rank) < TOLERANCE
        for mode, number, _, dense, ran, metrics in rank:
            assert ran <= dense, (mode, number)
            if metrics:
                assert (metrics["skip/executed_share"] == 1.0) == (not DEAD[number])
        assert sum(row[4] for row in rank) < 0.8 * sum(row[3] for row in rank)


def steps_of(rank: int, world: int, **layout) -> list[tuple]:
    """Step both engines over mini-batches: alive, dead everywhere, dead on one rank, dead everywhere, alive."""
    engines = rig.build(rig.Own, **layout), rig.build(rig.Skipping, **layout)
    everything = set(range(NUM_ROWS))
    found = []
    for number, dead in enumerate(({2, 3}, everything, {4, 5, 6, 7}, everything, {0})):
        rows = rig.padded_rows(NUM_ROWS, dead, seed=number)
        ran, told = [], []
        for engine in engines:
            engine.num_forwards = 0
            with engine.train_mode(disable_auto_offload=True):
                output = engine.train_batch(rig.mini_batch(rows, dynamic=True), rig.loss_of())
            ran.append(engine.num_forwards)
            told.append(rig.reported(engine, output) if output else {})
        found.append((rig.largest_difference(*(e.weights() for e in engines)), ran, told))
    return found


OVERLAP = dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True)
STEPPED = {
    "ddp": {}, "distributed": {"ddp": {"use_distributed_optimizer": True}},
    "overlap": {"ddp": OVERLAP | {"bucket_size": 2000}}, "pp2": {"pipeline": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", quick(STEPPED, "overlap", "pp2"))
def test_weights_after_ghost_steps_equal_verls_own(pool: Pool, name: str) -> None:
    """A ghost step moves the weights as verl's dense step on a zero gradient does, and runs no forward.

    Where the reduction overlaps the schedule, one filler of each rank runs instead. verl's worker reports the loss and
    the gradient norm of the dense run.
    """
    layout = STEPPED[name]
    overlaps = "overlap_grad_reduce" in layout.get("ddp", {})
    for rank in pool.run(2, steps_of, timeout_s=120, **layout):
        for number, (difference, (dense, ran), (wanted, got)) in enumerate(rank):
            is_dead = number in (1, 3)
            assert difference < TOLERANCE and (dense > ran == overlaps if is_dead else dense >= ran > 0)
            if wanted:
                for name in ("loss", "actor/pg_loss", "grad_norm"):
                    assert got[name] == pytest.approx(wanted[name], rel=TOLERANCE, abs=TOLERANCE)
                assert got["skip/ghost_steps"] == (is_dead and not overlaps)
                assert got["skip/executed_tokens"] == got["skip/executed_share"] * got["skip/dense_tokens"]


def silent_and_busy(rank: int, world: int) -> tuple[int, float]:
    """Run a mini-batch whose second rank has no signal; return the micro-batches that ran, and the share of tokens."""
    engine = rig.build(rig.Skipping)
    data = rig.mini_batch(rig.padded_rows(NUM_ROWS, {4, 5, 6, 7}), dynamic=True)
    _, output, ran = gradient(engine, data, rig.loss_of())
    return ran, values(output["metrics"])["skip/executed_share"]


def test_a_silent_rank_runs_as_many_fillers(pool: Pool) -> None:
    (busy, share), (silent, same) = pool.run(2, silent_and_busy, timeout_s=60)
    assert busy == silent > 1 and 0 < share == same < 0.9


def too_long(rank: int, world: int, kind: str) -> list[str]:
    """Return what an engine says of the last rank's longest rows, a token above the limit, with signal and without."""
    engine, said = rig.build(getattr(rig, kind)), []
    rows = rig.padded_rows(NUM_ROWS, set())
    rows = rows[rows["attention_mask"].sum(1).argsort()]
    for dead in ({0, 6}, {0, 7}, set(range(NUM_ROWS))):
        rows["advantages"][sorted(dead)] = 0.0
        data = rig.mini_batch(rows, dynamic=True)
        rig.tu.assign_non_tensor(data, max_token_len_per_gpu=int(rows["attention_mask"][-1].sum()) - 1)
        with pytest.raises((AssertionError, ConfigError)) as raised:
            engine.forward_backward_batch(data, rig.loss_of())
        assert engine.num_forwards == 0
        said.append(f"{raised.type.__name__}: {raised.value}")
    return said


def test_a_row_above_the_limit_ends_every_rank(pool: Pool) -> None:
    """verl's engine refuses such a row; ours does on every rank, whatever signal the row has, and names the setting."""
    (own,) = pool.run(1, too_long, "Own", timeout_s=60)
    assert all("max_token_len must be greater" in said for said in own)
    for world in (1, 2):
        for rank in pool.run(world, too_long, "Skipping", timeout_s=60):
            assert len(rank) == len(own)
            for said in rank:
                assert said.startswith("ConfigError: 2 rows of a mini-batch have more than 11 tokens"), said
                assert "actor.ppo_max_token_len_per_gpu" in said


def refused(rank: int, world: int) -> list[tuple[float, int, int, bool]]:
    """Compare both engines where nothing may be dropped: a KL in the loss, an entropy bonus, a loss of another name."""
    engines, other = (rig.build(rig.Own), rig.build(rig.Skipping)), policy_settings(loss_mode="geo_mean")
    rows, found = rig.padded_rows(NUM_ROWS, {2, 3, 6}), []
    rows["ref_log_prob"] = rows["old_log_probs"] - 0.2
    for changes in ({"use_kl_loss": True, "kl_loss_coef": 0.5}, {"entropy_coeff": 0.1}, {"policy_loss": other}):
        results = []
        for engine in engines:
            data = rig.mini_batch(rows, dynamic=True)
            rig.tu.assign_non_tensor(data, calculate_entropy="entropy_coeff" in changes)
            results.append(gradient(engine, data, rig.loss_of(**changes)))
        (wanted, _, dense), (got, output, ran) = results
        found.append((rig.largest_difference(got, wanted), dense, ran, "skip/executed_share" in output["metrics"]))
    return found


def test_what_exact_refuses_stays_whole(pool: Pool) -> None:
    for rank in pool.run(2, refused, timeout_s=60):
        for difference, dense, ran, told in rank:
            assert difference == 0.0 and dense == ran and not told


def loss_gradient(mode: str, rows: list[int], **changes) -> torch.Tensor:
    """Return the gradient of verl's loss of ``rows`` alone in the log-probs of all, [S, T]."""
    data = rig.padded_rows(NUM_ROWS, {2, 3, 6})
    mask, old = data["response_mask"].bool(), data["old_log_probs"]
    logprobs = (old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(3))).requires_grad_()
    counts = dict(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=NUM_ROWS, loss_scale_factor=20)
    config = rig.actor_config(policy_loss=policy_settings(loss_mode=mode, **changes), global_batch_info=counts)
    term = algorithms.get_policy_loss_fn(mode)
    found = [x[rows] for x in (old, logprobs, data["advantages"], mask)]
    loss, _ = term(*found, loss_agg_mode="token-mean", config=config, rollout_is_weights=None)
    return torch.autograd.grad(loss, logprobs)[0]


def policy_settings(**changes):
    return type(rig.actor_config().policy_loss)(**changes)


@pytest.mark.parametrize("mode", sorted(algorithms.POLICY_LOSS_REGISTRY))
def test_loss_modes_without_a_gradient_at_zero(mode: str) -> None:
    """Rows of advantage 0 move nothing in the modes that are taken; the others are refused."""
    loss = functools.partial(rig.ppo_loss, config=rig.actor_config(policy_loss=policy_settings(loss_mode=mode)))
    data = {"global_batch_size": NUM_ROWS, "response_mask": torch.ones(1, 1)}
    obstacles = loss_obstacles(loss, rig.ppo_loss, data, algorithms.get_policy_loss_fn)
    assert obstacles == ([] if mode in EXACT_LOSS_MODES else [f"actor.policy_loss.loss_mode={mode}"])
    if mode in EXACT_LOSS_MODES:
        everything, kept = list(range(NUM_ROWS)), [0, 1, 4, 5, 7]
        torch.testing.assert_close(loss_gradient(mode, kept), loss_gradient(mode, everything), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("mode", "changes"), [("dro", {"dro_beta": 0.3}), ("geo_mean", {})])
def test_refused_loss_modes_do_train_on_dropped_rows(mode: str, changes: dict) -> None:
    whole = loss_gradient(mode, list(range(NUM_ROWS)), **changes)
    assert (loss_gradient(mode, [0, 1, 4, 5, 7], **changes) - whole).abs().max() > 1e-4


def test_obstacles_are_named() -> None:
    """Every setting under which a row without advantage still trains is named, with its value."""

    def named(**changes) -> list[str]:
        rows, mask = changes.pop("batch", NUM_ROWS), changes.pop("mask", torch.ones(1))
        data = {"global_batch_size": rows, "response_mask": mask}
        return loss_obstacles(rig.loss_of(**changes), rig.ppo_loss, data, algorithms.get_policy_loss_fn)

    assert named() == named(use_kl_loss=True, kl_loss_coef=0) == named(use_kl_loss=False, kl_loss_coef=0.1) == []
    assert named(use_kl_loss=True, kl_loss_coef=0.001) == ["actor.kl_loss_coef=0.001"]
    assert named(entropy_coeff=0.01) == ["actor.entropy_coeff=0.01"]
    assert "global_batch_size" in named(loss_agg_mode="seq-mean-token-sum", batch=None)[0]
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert "loss_scale_factor" in named(loss_agg_mode="seq-mean-token-sum-norm", mask=nested)[0]
    assert named(loss_agg_mode="seq-mean-token-sum-norm") == []
    other = functools.partial(sft_loss, config=None)
    assert "ppo_loss" in loss_obstacles(other, rig.ppo_loss, {}, algorithms.get_policy_loss_fn)[0]
    assert model_obstacles({"moe_aux_loss_coeff": 0.0, "attention_dropout": 0.0, "fp8": None}) == []
    fields = {"moe_aux_loss_coeff": 0.01, "attention_dropout": 0.1, "moe_router_load_balancing_type": ["sinkhorn"]}
    said = ["moe_router_load_balancing_type=['sinkhorn']", "attention_dropout=0.1", "moe_aux_loss_coeff=0.01"]
    assert model_obstacles(fields) == said


def test_rows_with_signal() -> None:
    """A row has signal where an advantage × mask is not 0, and a number that is not finite counts as one."""
    data = rig.left_right_2_no_padding(rig.padded_rows(NUM_ROWS, {2, 5, 6}))
    data["advantages"][6, 0] = float("nan")
    rows = rows_of(data)
    assert rows.has_signal == (True, False, False, True, True, False, True, True)
    assert rows.loss_tokens == int(data["response_mask"].sum())
    assert rows.tokens(range(NUM_ROWS)) == data["input_ids"].values().numel()


def test_fillers_are_the_shortest_rows_of_weight_zero() -> None:
    rows = Rows(lengths=(9, 4, 2, 1), has_signal=(True, False, False, True), loss_tokens=5)
    assert rows.with_fillers(1) == [0, 3] and rows.with_fillers(4) == [0, 3, 2, 2]
    assert Rows(lengths=(9,), has_signal=(True,), loss_tokens=5).with_fillers(2) is None


def test_the_plug_in_precedes_verls_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl chooses ours for NVIDIA devices and language models, and keeps its own for the rest."""
    assert plugin.register_engine()
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    chosen = {}
    for vendor in ("nvidia", "amd"):
        monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
        chosen[vendor] = EngineRegistry.get_engine_cls("language_model", "megatron")
    assert chosen == {"nvidia": verl_engine.SkippingEngine, "amd": rig.MegatronEngineWithLMHead}
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert not issubclass(EngineRegistry.get_engine_cls("value_model", "megatron"), verl_engine.SkippingEngine)


INSTALLED = """
import sys
import verl
assert "megatron_rl.integrations.verl" in sys.modules, "the entry point was not loaded"
assert not any(name.partition(".")[0] == "megatron" for name in sys.modules), "import verl brought Megatron-Core"
from verl.workers.engine import EngineRegistry
print(EngineRegistry.get_engine_cls("language_model", "megatron").__name__)
"""


def test_the_entry_point_is_all_that_it_takes(tmp_path: pathlib.Path) -> None:
    """An installation's entry point turns the skip on at ``import verl``, and brings nothing along."""
    (declared,) = re.findall(r'"verl.plugins": \["(.+?)"\]', (ROOT / "setup.py").read_text())
    installed = tmp_path / "probe-0.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 0.0.0\n")
    (installed / "entry_points.txt").write_text(f"[verl.plugins]\n{declared}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    environment |= {"VERL_USE_EXTERNAL_PLUGINS": "megatron_rl", "VERL_ENGINE_DEVICE": "cuda"}
    environment["VERL_ENGINE_VENDOR"] = "nvidia"
    command = [sys.executable, "-W", "ignore", "-c", INSTALLED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "SkippingEngine"


def test_another_version_or_plug_in_is_left_alone_loudly(monkeypatch, caplog) -> None:
    caplog.set_level(logging.WARNING)
    place = EngineRegistry._engines["language_model"]["megatron"]
    monkeypatch.setitem(place, ("cuda", "nvidia"), rig.MegatronEngineWithLMHead)
    assert not plugin.register_engine() and "registered for (cuda, nvidia) already" in caplog.text
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda name: "0.10.0")
    assert not plugin.register_engine() and "OFF: it was written for verl 0.9.1 and this is 0.10.0" in caplog.text


def test_the_log_says_what_is_on(monkeypatch, caplog) -> None:
    """The log says once that the skip is on, and names what keeps it off, whenever that changes."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(verl_engine.dist, "get_rank", lambda: 0)
    engine = SimpleNamespace(_said=None)
    for obstacles in ((), (), ("actor.entropy_coeff=0.1",), ("actor.entropy_coeff=0.1",)):
        verl_engine.SkippingEngine._say(engine, obstacles)
    first, second = caplog.messages
    assert "is ON" in first and "drops NOTHING" in second and "actor.entropy_coeff=0.1" in second
