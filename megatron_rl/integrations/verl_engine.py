"""A subclass of verl's Megatron engine that leaves samples without gradient out of training. Written for verl 0.9.1.

Only ``forward_backward_batch`` in training differs from verl's. A row (a sample, in verl's words) has
signal if one of its advantages is not 0. Rows without signal leave the mini-batch before verl splits
it into micro-batches. The loss still divides by the token count of the whole mini-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from megatron_rl.errors import ConfigError
from megatron_rl.integrations.verl_rows import Rows, loss_obstacles, model_obstacles, round_up, rows_of

logger = logging.getLogger(__name__)


class SkippingEngine(MegatronEngineWithLMHead):
    """Trains verl's language models on Megatron-Core, without the rows (samples) that give no gradient.

    If no row of a mini-batch on any data-parallel rank has signal, the step is a ghost step. It has
    no forward, no backward and no reduction, and verl's ``optimizer_step`` runs on zero gradients.
    If only some ranks have no signal, they run fillers, rows of weight zero, in as many
    micro-batches as the other ranks.
    """

    _said: tuple[str, ...] | None = None  # the obstacles that the log has named

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False) -> Any:
        """Run forward and backward of one mini-batch, like verl's method of this name.

        In training, rows that have no signal are left out.

        data: this rank's rows.
        loss_function, forward_only: as in verl's method; ``forward_only`` is False in training.

        Returns what verl's method returns. The metrics of the last pipeline stage also hold the
        numbers of tokens that ran and of all tokens, summed over the data-parallel ranks.

        Raises ConfigError on every rank if a row of any rank exceeds a micro-batch's token limit.
        verl's own method raises AssertionError on that rank alone.
        """
        if forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only)
        obstacles = tuple(self._obstacles(data, loss_function))
        self._say(obstacles)
        if obstacles:
            return super().forward_backward_batch(data, loss_function, forward_only)
        rows, limit = rows_of(data), self._limit(data)
        too_long = 0 if limit is None else sum(length > limit for length in rows.lengths)
        with_signal, loss_tokens, dense_tokens, too_long = self._over_ranks(
            [len(rows.kept), rows.loss_tokens, sum(rows.lengths), too_long], dist.ReduceOp.SUM
        )
        if too_long:
            raise ConfigError(
                f"{too_long} rows of a mini-batch have more than {limit} tokens each, signal or none; the limit is "
                "actor.ppo_max_token_len_per_gpu times the context-parallel ranks; raise it, or lower "
                "data.max_response_length or data.max_prompt_length"
            )
        if not with_signal and not self._overlaps:
            return self._ghost(dense_tokens)
        chosen = self._choose(rows, data, limit)
        if chosen is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        (executed,) = self._over_ranks([rows.tokens(chosen)], dist.ReduceOp.SUM)
        if chosen != list(range(len(data))):
            data = tu.index_select_tensor_dict(data, chosen)
        output = super().forward_backward_batch(data, _counting(loss_function, loss_tokens), forward_only)
        if "metrics" in output:
            output["metrics"] |= _metrics(executed, dense_tokens, ghost=False)
        return output

    def _obstacles(self, data: TensorDict, loss_function: Callable) -> list[str]:
        """Return the reasons why even rows without signal must run in this mini-batch; [] if there are none.

        They are the same on every rank.
        """
        obstacles = loss_obstacles(loss_function, ppo_loss, data, get_policy_loss_fn)
        obstacles += model_obstacles(vars(self.tf_config))
        untried = {
            "dynamic_context_parallel": self.engine_config.dynamic_context_parallel,
            "use_megatron_fsdp": self.engine_config.use_megatron_fsdp,
            "router_replay": self.enable_routing_replay,
            "qat": self._qat_enabled,
            "vision_config": hasattr(self.model_config.hf_config, "vision_config"),
            "force_group_size": tu.get_non_tensor_data(data, key="force_group_size", default=1) != 1,
            "lora.dropout": self.peft_cls is not None and bool(self.model_config.lora.get("dropout", 0)),
        }
        return obstacles + [f"{name} (not tried)" for name, is_on in untried.items() if is_on]

    def _say(self, obstacles: tuple[str, ...]) -> None:
        if obstacles == self._said:
            return
        self._said = obstacles
        if dist.get_rank() != 0:
            return
        if obstacles:
            logger.warning(
                "megatron_rl's zero-advantage skip drops NOTHING in this run: under %s a row without advantage trains, "
                "or may train; verl's engine runs as it is",
                ", ".join(obstacles),
            )
        else:
            logger.warning(
                "megatron_rl's zero-advantage skip is ON in verl's Megatron engine: updates run without the rows whose "
                "every advantage is 0 (skip/executed_share times verl's mfu is the mfu of what ran); "
                "VERL_USE_EXTERNAL_PLUGINS=none turns it off"
            )

    @property
    def _overlaps(self) -> bool:
        """Return whether Megatron overlaps gradient or parameter collectives with the passes.

        Then even a step without signal must run the passes, since they start the collectives.
        """
        config = self.module[0].ddp_config
        return config.overlap_grad_reduce or config.overlap_param_gather

    def _over_ranks(self, values: list[int], op: dist.ReduceOp) -> list[int]:
        found = torch.tensor(values, dtype=torch.int64, device=get_device_name())
        dist.all_reduce(found, op=op, group=self.get_data_parallel_group())
        return found.tolist()

    def _limit(self, data: TensorDict) -> int | None:
        """Return the most tokens of a micro-batch; None if verl limits a micro-batch's number of rows instead."""
        if not tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True):
            return None
        return data["max_token_len_per_gpu"] * self.engine_config.context_parallel_size

    def _choose(self, rows: Rows, data: TensorDict, limit: int | None) -> list[int] | None:
        """Return the indices of the rows that this rank runs: rows with signal, then fillers.

        A filler is a row without signal: all its advantages are 0. Fillers make verl form the same
        number of micro-batches on every rank. Returns None on every rank if any rank needs a filler
        and has no row without signal.

        limit: the most tokens of a micro-batch; None if verl limits the number of rows.
        """
        # The numbers of micro-batches are tried in verl's own order (utils/seqlen_balancing.py
        # ``rearrange_micro_batches``), so verl arrives at the number found here. The search ends: no row exceeds the
        # limit, so one micro-batch per row fits.
        step = self.tf_config.microbatch_group_size_per_vp_stage if len(self.module) > 1 else 1
        if limit is not None:
            needed = -(-rows.tokens(rows.kept) // limit)
        else:
            size = data["micro_batch_size_per_gpu"]
            needed = -(-len(rows.kept) // size)
        (number,) = self._over_ranks([max(needed, 1)], dist.ReduceOp.MAX)
        number = round_up(number, step)
        while True:
            chosen = rows.with_fillers(number * size if limit is None else number)
            if chosen is None:
                state = 0
            else:
                state = 1 + (limit is None or _fits([rows.lengths[row] for row in chosen], number, limit))
            (state,) = self._over_ranks([state], dist.ReduceOp.MIN)
            if state != 1:
                return chosen if state == 2 else None
            number += step

    def _ghost(self, dense_tokens: int) -> dict[str, Any]:
        """Return the result of ``forward_backward_batch`` for a mini-batch that did not run: loss 0 and metrics.

        Returns {} on ranks whose result verl does not read.

        dense_tokens: the tokens of the whole mini-batch, over all data-parallel ranks.
        """
        if not self.is_mp_src_rank_with_outputs():
            return {}
        loss = Metric(value=0.0, aggregation=AggregationType.SUM)
        metrics = {"actor/pg_loss": loss, **_metrics(0, dense_tokens, ghost=True)}
        return {"model_output": {}, "loss": [0.0], "metrics": metrics}


def _fits(lengths: list[int], number: int, limit: int) -> bool:
    """Return whether verl's division of rows into ``number`` micro-batches keeps each within ``limit`` tokens.

    lengths: the tokens of each row.
    """
    work = calculate_workload(torch.tensor(lengths, dtype=torch.int64)).tolist()
    parts = get_seqlen_balanced_partitions(work, number, equal_size=False)
    return all(sum(lengths[row] for row in part) <= limit for part in parts)


def _counting(loss_function: Callable, loss_tokens: int) -> Callable:
    """Return the loss function with ``batch_num_tokens`` set to ``loss_tokens``, the count of the whole mini-batch.

    verl would count only the rows that it is given.
    """

    def counted(model_output: dict, data: TensorDict, dp_group: Any = None) -> Any:
        tu.assign_non_tensor(data, batch_num_tokens=loss_tokens)
        return loss_function(model_output=model_output, data=data, dp_group=dp_group)

    return counted


def _metrics(executed: int, dense: int, *, ghost: bool) -> dict[str, Metric]:
    """Return the metrics that tell how much of a mini-batch ran, equal on every rank.

    executed, dense: the tokens that ran and the tokens of the whole mini-batch, over all
        data-parallel ranks.
    ghost: True if nothing ran, as no row has signal.
    """
    values = {
        "skip/executed_tokens": executed,
        "skip/dense_tokens": dense,
        "skip/executed_share": executed / dense,
        "skip/ghost_steps": float(ghost),
    }
    return {name: Metric(value=value, aggregation=AggregationType.MEAN) for name, value in values.items()}
