"""The conversion of a GPU's speed, or of coefficients that a run has measured, to the seconds of a forecast.

A token costs, forward and backward, 6 FLOPs per element of each matrix that it passes (8 under full
recompute). In the LM head a loss token costs 8 FLOPs per element, since its logits are computed
twice, and other tokens cost nothing. Causal attention costs 6 · heads · head_dim FLOPs per layer,
times Σ l² over the samples' lengths l.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass

import numpy as np

from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_bytes
from megatron_rl.observability.trace import fitted_with
from megatron_rl.planning.cost import LEAST_LAYERS, CostModel, StageCost
from megatron_rl.simulator.degrees import Degrees
from megatron_rl.simulator.memory import stage_parameters
from megatron_rl.simulator.placed import PlacedModel
from megatron_rl.weights.model_shape import ModelShape

# Stated, not measured: HBM of 2 TB/s under 30 bytes of AdamW per parameter; 6 bytes (float32 gradients out, bfloat16
# weights back) over 100 GB/s per GPU.
ADAM_S, REDUCE_S = 30 / 2e12, 6 / 100e9
HEAD_FLOPS = 8.0  # per element of the LM head
# Assumed for a GPU in matrix products if --flops is not given, of 989e12 (H100, bfloat16): 40 %, and 27 % for a
# mixture's many small products and their exchanges. Published for mixtures: 24 to 30 % (docs/simulate-cluster.md).
DENSE_FLOPS_PER_S, MIXTURE_FLOPS_PER_S = 4e14, 2.7e14


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Holds the speed of one GPU (or process).

    flops_per_s: FLOP/s in matrix products.
    attention_flops_per_s: FLOP/s in attention scores.
    layer_overhead_s: seconds per micro-batch and layer, forward and backward together.
    adam_s: seconds of AdamW for each parameter whose optimizer state the rank holds.
    reduce_s: seconds of reduction for each parameter whose gradient the rank reduces with other
        ranks.
    update_overhead_s: seconds per optimizer step.
    """

    flops_per_s: float
    attention_flops_per_s: float
    layer_overhead_s: float
    adam_s: float = ADAM_S
    reduce_s: float = REDUCE_S
    update_overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Holds the costs from which a forecast computes seconds.

    model: gives the seconds of a micro-batch on each pipeline rank, from the micro-batch's number of
        tokens and the sum of its samples' squared lengths.
    forward_share: the share of a micro-batch's time that its forward pass takes.
    optimizer_s: seconds of reduction, norm, AdamW and gather of one optimizer step.
    chunk_shares: for each model chunk, in the order of the layers, its share of its pipeline rank's
        time.
    source: the origin of the costs, in words.
    from_run: True if a run with the same pipeline stages measured these costs. If so, and if
        ``plan.calibrate`` is on, the forecast also plans micro-batches by them.
    """

    model: CostModel
    forward_share: float
    optimizer_s: float
    chunk_shares: tuple[float, ...]
    source: str
    from_run: bool = False

    def chunk_seconds(self, tokens: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (forward seconds, backward seconds) of each micro-batch, [chunks, M] each.

        tokens, squares: [M], the tokens and the sum of squared lengths of each micro-batch. Chunks
            are in the order of the layers.
        """
        ranks = self.model.stages
        rank_s = np.array([rank.seconds(tokens, squares) for rank in ranks]).reshape(len(ranks), len(tokens))
        chunk_s = np.concatenate([rank_s] * self.model.virtual) * np.array(self.chunk_shares)[:, None]
        return chunk_s * self.forward_share, chunk_s * (1 - self.forward_share)


def layer_flops(shape: ModelShape) -> tuple[float, float]:
    """Return (FLOPs per token, FLOPs per squared length of a sample) of one layer, forward and backward.

    The second number is for attention scores, in a layer that has attention. The first is for
    everything else, in an average layer.
    """
    return 6.0 * shape.mean_token_cost, 6.0 * shape.score_width


def machine_costs(machine: Machine, placed: PlacedModel, *, loss_share: float, source: str) -> Costs:
    """Return the costs of a model on GPUs of the given speed.

    loss_share: the number of loss tokens over the number of all tokens.
    source: the origin of the speed, in words.
    """
    shape, degrees = placed.shape, placed.degrees
    recompute_factor = 4 / 3 if placed.full_recompute else 1.0
    split = degrees.tensor_size * degrees.context_size
    linear, scores = layer_flops(shape)
    head = shape.head_cost(loss_share, times=HEAD_FLOPS, columns=shape.padded_vocab_size) / split / machine.flops_per_s
    stages = []
    for rank, (share, layers, with_attention) in enumerate(shape.rank_shares(degrees.pipeline_size)):
        token = linear * recompute_factor * max(share, LEAST_LAYERS) / split / machine.flops_per_s
        stages.append(
            StageCost(
                overhead=machine.layer_overhead_s * layers * recompute_factor,
                token=token + (head if rank == degrees.pipeline_size - 1 else 0.0),
                square=scores * recompute_factor * with_attention / split / machine.attention_flops_per_s,
            )
        )
    return Costs(
        model=CostModel(stages=tuple(stages), virtual=degrees.virtual_size),
        chunk_shares=chunk_shares(shape, degrees, loss_share),
        forward_share=1 / 4 if recompute_factor > 1 else 1 / 3,
        optimizer_s=max(optimizer_seconds(machine, placed, stage) for stage in range(degrees.pipeline_size)),
        source=source,
    )


def chunk_shares(shape: ModelShape, degrees: Degrees, loss_share: float) -> tuple[float, ...]:
    """Return each model chunk's share of its pipeline rank's time, in the order of the layers.

    The time is taken as proportional to the layers' cost per token, attention's scores left out.

    loss_share: the number of loss tokens over the number of all tokens; only loss tokens pass the
        LM head.
    """
    costs = np.array([sum(map(shape.token_cost, shape.layers_on(stage))) for stage in range(shape.num_stages)])
    costs = np.maximum(costs, LEAST_LAYERS * shape.mean_token_cost)
    costs[-1] += shape.head_cost(loss_share)
    of_ranks = np.tile(costs.reshape(-1, degrees.pipeline_size).sum(0), degrees.virtual_size)
    return tuple((costs / of_ranks).tolist())


def optimizer_parameters(placed: PlacedModel, stage: int) -> tuple[float, float]:
    """Return two numbers of parameters for one rank of a pipeline stage.

    First come the parameters that the rank updates by AdamW, then those whose gradients the rank
    reduces with other ranks.
    """
    degrees = placed.degrees
    dense, experts = stage_parameters(placed.shape, degrees, stage)
    replicas = degrees.data_size * degrees.context_size
    own = dense / replicas + experts / degrees.expert_data_size if placed.shards_optimizer else dense + experts
    return own, (dense if replicas > 1 else 0) + (experts if degrees.expert_data_size > 1 else 0)


def optimizer_seconds(machine: Machine, placed: PlacedModel, stage: int) -> float:
    own, reduced = optimizer_parameters(placed, stage)
    return machine.update_overhead_s + machine.adam_s * own + machine.reduce_s * reduced


def stated_machine(flops_per_s: float, placed: PlacedModel, overhead_tokens: float) -> Machine:
    """Return the speed of a GPU for which only ``flops_per_s`` is known.

    overhead_tokens: the fixed cost of a micro-batch, as a number of tokens that take as long
        (``plan.microbatch_overhead_tokens``).
    """
    degrees = placed.degrees
    token = layer_flops(placed.shape)[0] / (degrees.tensor_size * degrees.context_size * flops_per_s)
    return Machine(
        flops_per_s=flops_per_s,
        attention_flops_per_s=flops_per_s,
        layer_overhead_s=overhead_tokens * token,
    )


def assumed_flops(shape: ModelShape) -> tuple[float, str]:
    """Return (the FLOP/s that a GPU is assumed to reach on a model, the number's origin in words)."""
    if shape.num_experts:
        return MIXTURE_FLOPS_PER_S, (
            f"assumed: {MIXTURE_FLOPS_PER_S:.3g} FLOP/s per GPU (27 % of an H100's; of mixtures 24 to 30 % are "
            "published, docs/simulate-cluster.md)"
        )
    return DENSE_FLOPS_PER_S, f"assumed: {DENSE_FLOPS_PER_S:.3g} FLOP/s per GPU (40 % of an H100's)"


def load_coefficients(path: str | pathlib.Path, placed: PlacedModel, *, loss_share: float) -> Costs:
    """Return the costs in a JSON file, which has one of two forms.

    path: the file; or a folder, such as a run's, of which coefficients.json is read.
    loss_share: the number of loss tokens over the number of all tokens, for the LM head's cost.

    First, a file that a run wrote is ``{"stages": [{"overhead": s, "token": s, "square": s}, ...],
    "virtual": 1, "optimizer_s": s, "measured_on": "..."}``, with one entry per pipeline stage.
    "overhead" is a stage's seconds per micro-batch, "token" those per token, and "square" those per
    squared length of a sample. "virtual" is the number of model chunks per rank. The file may also
    have "forward_share", the forward pass's share of a micro-batch's time. It may have "fitted_with",
    settings that must equal this configuration's.

    Second, a file on a GPU's speed is ``{"machine": {"flops_per_s": ..., ...}, "measured_on":
    "..."}``, with the fields of Machine.

    Raises ConfigError for a file that cannot be read, or that was measured under other settings.
    """
    path = pathlib.Path(path)
    path = path / "coefficients.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"--coefficients {path} does not exist; give a file, or the folder of a run that has taken an optimizer "
            "step"
        )
    text = read_bytes(path, "coefficients", most_bytes=1 << 24, error=ConfigError)
    try:
        content = json.loads(text.decode())
        source = f"coefficients of {path.name}: {content.get('measured_on', 'not said where measured')}"
        # Rates of a machine give every stage's costs; a run's own stages are taken as they were fitted.
        if "machine" in content:
            machine = Machine(**content["machine"])
            return machine_costs(machine, placed, loss_share=loss_share, source=source)
        model = CostModel(
            stages=tuple(StageCost(**stage) for stage in content["stages"]), virtual=content.get("virtual", 1)
        )
        forward_share = float(content.get("forward_share", 1 / 4 if placed.full_recompute else 1 / 3))
        costs = Costs(
            model=model,
            forward_share=forward_share,
            optimizer_s=float(content["optimizer_s"]),
            chunk_shares=chunk_shares(placed.shape, placed.degrees, loss_share),
            source=source,
            from_run=True,
        )
        fitted = dict(content.get("fitted_with", {}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--coefficients {path} cannot be read ({type(error).__name__}: {error}); it holds JSON with stages, "
            "virtual and optimizer_s, or with machine (see docs/simulate-cluster.md)"
        ) from error
    wanted = fitted_with(placed.shape, placed.dtype, placed.degrees)
    _check_fitted(path, costs.model, fitted, placed.degrees, wanted)
    return costs


def _check_fitted(path: pathlib.Path, model: CostModel, fitted: dict, degrees: Degrees, wanted: dict) -> None:
    fix = "give a file fitted there, one with machine rates, or --flops (with --trace for a run's samples alone)"
    if (len(model.stages), model.virtual) != (degrees.pipeline_size, degrees.virtual_size):
        raise ConfigError(
            f"--coefficients {path} was fitted with {len(model.stages)} pipeline stages of {model.virtual} chunks and "
            f"this configuration has {degrees.pipeline_size} of {degrees.virtual_size}; {fix}"
        )
    different = {
        name: (fitted[name], value) for name, value in wanted.items() if name in fitted and fitted[name] != value
    }
    if different:
        differences = ", ".join(
            f"{name}={was} where this configuration has {value}" for name, (was, value) in different.items()
        )
        raise ConfigError(f"--coefficients {path} was fitted with {differences}; {fix}")
