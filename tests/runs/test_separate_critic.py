"""Under critic.placement=separate, ranks of its own train, save and fail the critic of a run as shared ones do."""

import pathlib
import shutil
import signal

import pytest

from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.cli import EXIT_CONFIG, EXIT_PREEMPTED
from megatron_rl.config import load_config
from megatron_rl.critic.link import holds_critic, local_policy_ranks
from megatron_rl.errors import ConfigError
from megatron_rl.train import main
from tests.pairwise import quick
from tests.patience import patient, until
from tests.runs.command import PPO, SAVED, apart, arguments, assert_same_run, firsts_of, rows_of
from tests.workers.nursery import Nursery

BOUND_S = patient(600)
NEVER = f"run.deadline_s={10 * BOUND_S:g}"  # a deadline that no test waits for
SEPARATE = ("critic.placement=separate", "critic.ranks=1")
GRIDS = ("critic.placement=separate", "critic.ranks=2", "critic.parallel.tensor=2")
FAILURES = {"policy": ("reward.functions=[tests.reward_functions:infinite]", "its value is inf"),
            "critic": ("critic.hf_path=EMPTY", "holds neither model.safetensors nor")}


def ran(nursery: Nursery, world: int, folder: pathlib.Path, inputs: pathlib.Path, *overrides: str) -> pathlib.Path:
    with nursery.ranks(world, arguments(inputs, folder, *PPO, NEVER, *overrides), folder / "printed") as ranks:
        assert ranks.wait(BOUND_S) == [0] * world, ranks.said()[-6000:]
    return folder


def test_a_separate_critic_trains_the_shared_ones_run(nursery, made, arithmetic, tmp_path):
    """They are the same to the bit, in two parts too, where each critic's checkpoint is its own."""
    for rollouts in (1, 2):
        ran(nursery, 2, tmp_path, arithmetic, *SAVED, *SEPARATE, f"train.num_rollouts={rollouts}")
    checkpoints = tmp_path / "checkpoints"
    assert whole_checkpoints(checkpoints) == whole_checkpoints(checkpoints / "critic") == [0, 1, 2]
    assert_same_run(made(1, *PPO, *SAVED), tmp_path)


def test_policy_and_critic_have_grids_of_their_own(nursery, made, arithmetic, tmp_path):
    """Two ranks of policy and a critic on two tensor ranks train the run of one rank with both, to rounding."""
    once = "train.num_rollouts=1"
    alone, four = made(1, *PPO, once), ran(nursery, 4, tmp_path, arithmetic, *GRIDS, once)
    assert apart(alone, four) < 1e-5
    losses = [[row["critic/loss"] for row in firsts_of(folder, "critic/loss")] for folder in (alone, four)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("side", quick(FAILURES, "critic"))
def test_a_failure_on_one_side_ends_both(nursery, arithmetic, tmp_path, side):
    shutil.copytree(arithmetic / "model", tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    override, said = FAILURES[side]
    override = override.replace("EMPTY", str(tmp_path / "empty"))
    given = arguments(arithmetic, tmp_path, *PPO, *SEPARATE, override, NEVER)
    with nursery.ranks(2, given, tmp_path / "printed") as ranks:
        codes = ranks.wait(BOUND_S)  # no wait ran into its deadline
        assert None not in codes and 0 not in codes and said in ranks.said(), (codes, ranks.said()[-6000:])


@pytest.mark.parametrize("placement", quick([(), SEPARATE], SEPARATE), ids=["shared", "separate"])
def test_a_critics_checkpoint_that_cannot_be_written_meets_on_error(nursery, arithmetic, tmp_path, placement):
    """A file stands where its folder should be: ``continue`` goes on without checkpoints."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "critic").write_text("")
    ran(nursery, 2 if placement else 1, tmp_path, arithmetic, *SAVED, *placement, "checkpoint.on_error=continue")
    assert whole_checkpoints(tmp_path / "checkpoints") == [] and len(rows_of(tmp_path)) == 8


def has_rows(folder: pathlib.Path, count: int) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= count


def test_a_signal_to_the_critics_rank_alone_preempts_the_run(nursery, arithmetic, tmp_path):
    given = arguments(arithmetic, tmp_path, *PPO, *SAVED, *SEPARATE, NEVER, "train.num_rollouts=100000")
    with nursery.ranks(2, given, tmp_path / "printed") as ranks:
        assert until(lambda: has_rows(tmp_path, 4) or not ranks.run()) and ranks.run(), ranks.said()[-6000:]
        ranks.forks[1].send_signal(signal.SIGUSR1)
        assert ranks.wait(BOUND_S) == [EXIT_PREEMPTED] * 2, ranks.said()[-6000:]
    done = whole_checkpoints(tmp_path / "checkpoints")
    assert done and done == whole_checkpoints(tmp_path / "checkpoints" / "critic")


def test_a_critics_rank_that_is_killed_ends_the_run_with_a_name(nursery, arithmetic, tmp_path):
    """Nobody launches these ranks: the others must notice a lost one themselves, before the deadline."""
    given = arguments(arithmetic, tmp_path, *PPO, *GRIDS, "train.num_rollouts=100000", NEVER)
    with nursery.ranks(3, given, tmp_path / "printed") as ranks:
        assert until(lambda: has_rows(tmp_path, 4) or not ranks.run()) and ranks.run(), ranks.said()[-6000:]
        ranks.forks[2].kill()
        assert ranks.wait(BOUND_S)[:2] == [1, 1], ranks.said()[-6000:]
        assert "a rank of the critic failed" in ranks.printed[0].read_text(), ranks.said()[-6000:]


def test_what_cannot_be_placed_is_named(monkeypatch, arithmetic, tmp_path, capfd):
    given = ["advantage.estimator=gae", "critic.placement=separate", "critic.ranks=2"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"critic.ranks=2 leaves the policy none of the 2 ranks"):
        holds_critic(load_config(None, given).separate_critic_ranks)
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="start them with torchrun or srun"):
        holds_critic(load_config(None, given).separate_critic_ranks)
    with pytest.raises(ConfigError, match="critic.ranks=null"):
        load_config(None, given[:2])
    with pytest.raises(ConfigError, match="critic.init=policy"):
        load_config(None, [*given, "critic.init=policy"])
    for override in (
        "critic.hf_path=/nowhere", "critic.parallel.tensors=2", "replay.capacity_groups=8", "critic.warmup_rollouts=2",
        "advantage.noise_std=0.1", "critic.optimizer.lr=1", "correction.off_policy_delta=0.1",
    ):
        extra = ["advantage.noise_steps=3"] if "noise" in override else []
        assert main([*arguments(arithmetic, tmp_path, *PPO), override, *extra]) == EXIT_CONFIG
        assert override.split("=")[0] in capfd.readouterr().err
    for override in ("critic.warmup_rollouts=1", "critic.hf_path=/nowhere", "critic.parallel.tensor=2"):
        assert main([*arguments(arithmetic, tmp_path), override]) == EXIT_CONFIG
        assert "advantage.estimator=grpo has no critic" in capfd.readouterr().err


def test_engines_count_a_nodes_policy_ranks(monkeypatch):
    """Of twelve ranks on three nodes the last five are the critic's: 4, 3 and none of a node hold the policy."""
    config = load_config(None, ["advantage.estimator=gae", "critic.placement=separate", "critic.ranks=5"])
    monkeypatch.setenv("WORLD_SIZE", "12")
    num_critic = config.separate_critic_ranks
    assert [local_policy_ranks(num_critic, rank, rank % 4, 4) for rank in (0, 3, 4, 6)] == [4, 4, 3, 3]
    assert load_config(None).separate_critic_ranks == 0
