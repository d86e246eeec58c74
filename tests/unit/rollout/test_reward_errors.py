"""rollout/reward_metrics.py: failed rewards are counted (over ranks: tests/runs), and all of them end the run."""

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.errors import RewardError
from megatron_rl.rollout.reward_metrics import RewardErrors, count_errors, judge_errors
from megatron_rl.types import Score
from tests.unit.reward.rig import groups_of, with_environment


def test_counts_warning_and_end(caplog):
    rollouts = with_environment(groups_of(["a", "b", "c"]), 1.0, 1.0, None, excluded=(2,))
    for failing, share, warns in (({1}, 0.5, True), ({1, 2}, 0.6, False), ({2}, 0.0, False), ({0, 1}, 1.0, None)):
        scores = [Score(total=0.0, by_function=(), error=f"E: {i}" if i in failing else None) for i in range(3)]
        found, failed = count_errors(zip(rollouts, scores, strict=True)), sorted(failing - {2})
        first = f"0@0#{failed[0]}: E: {failed[0]}" if failed else None
        assert found == RewardErrors(failed=len(failed), scored=2, first=first, is_here=bool(failed))
        config = RewardConfig(on_error="zero", error_warning_share=share)
        if warns is None:
            with pytest.raises(RewardError, match="^rollout 3: the reward of all 2 samples failed.*0@0#0: E: 0"):
                judge_errors(found, config, "rollout 3")
        else:
            judge_errors(found, config, "rollout 3")
            assert [r.getMessage().endswith(f"the first was {first}") for r in caplog.records] == [True] * warns
        caplog.clear()
