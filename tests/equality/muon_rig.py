"""A plain Muon over a Hugging Face model's tensors, one matrix after the other, and a run's weights beside its own."""

import functools

import numpy as np
import torch

from megatron_rl.types import StepKind
from megatron_rl.weights.export import export_weights
from tests.equality.critic_rig import naive, open_critic, targets
from tests.equality.matrix import CLIP, DECAY, LR, NUM_SAMPLES, PER_MINI_BATCH, STEPS
from tests.equality.rig import config_of, layers_of, open_rig, ragged_advantages
from tests.reference import file_weights, make_samples, near_policy, reference_gradient, relative_error, tiny_model

MUON = ("optimizer.algorithm=muon", "optimizer.momentum=0.9")
MOMENTUM, BETAS, EPSILON = 0.9, (0.9, 0.999), 1e-8
BY_ADAM = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router", "shared_expert_gate", "conv1d", "score")


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return Jordan's five iterations of a matrix, as his listing has them."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if transposed else x


def matrices_of(name: str, tensor: torch.Tensor, config) -> list[torch.Tensor]:
    """Return views of the matrices in a file's tensor; [] if AdamW steps the tensor."""
    if tensor.dim() != 2 or any(word in name for word in BY_ADAM):
        return []
    if "in_proj_qkv." in name:
        key = config.linear_num_key_heads * config.linear_key_head_dim
        return list(tensor.split([key, key, len(tensor) - 2 * key]))
    if "gate_up_proj" in name:  # one below the other in phi3, by turns in gpt_oss
        return list(tensor.chunk(2)) if "experts" not in name else [tensor[:, 0::2], tensor[:, 1::2]]
    if "qkv_proj" in name:
        head = config.hidden_size // config.num_attention_heads
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        return list(tensor.split([head * x for x in heads]))
    return [tensor]


class PlainMuon:
    """Steps the tensors of a model under their names in files, with AdamW written out for what is no matrix."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.config, self.weights, self.steps = model.config, file_weights(model), 0
        self.momenta: dict[str, torch.Tensor] = {}
        self.squares: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, gradients: dict[str, torch.Tensor]) -> float:
        """Clip and step; return the norm before."""
        norm = float(sum((g.double() ** 2).sum() for g in gradients.values()) ** 0.5)
        self.steps += 1
        for name, gradient in gradients.items():
            weight, gradient = self.weights[name], gradient * min(1.0, CLIP / (norm + 1e-6))
            if not self.momenta.get(name, torch.zeros(0)).numel():
                self.momenta[name], self.squares[name] = torch.zeros_like(weight), torch.zeros_like(weight)
            if matrices_of(name, weight, self.config):
                momentum = self.momenta[name].mul_(MOMENTUM).add_(gradient)
                ahead = gradient + MOMENTUM * momentum
                pairs = (matrices_of(name, x, self.config) for x in (weight, ahead))
                for part, direction in zip(*pairs, strict=True):
                    update = newton_schulz(direction) * 0.2 * max(part.shape) ** 0.5
                    part.copy_(part - LR * (update + DECAY * part))
                continue
            first = self.momenta[name].mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
            second = self.squares[name].mul_(BETAS[1]).add_(gradient**2, alpha=1 - BETAS[1])
            update = first / (1 - BETAS[0] ** self.steps)
            update = update / ((second / (1 - BETAS[1] ** self.steps)).sqrt() + EPSILON)
            decay = DECAY if weight.dim() > 1 and not name.endswith("_bias") else 0.0
            weight.copy_(weight - LR * (update + decay * weight))
        return norm


@functools.cache
def wanted(family: str, layers: int, ghost: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Return a model's weights before and after three steps and maybe one without gradient, and the first norm."""
    _, model = tiny_model(family, layers=layers)
    samples = near_policy(model, make_samples(NUM_SAMPLES))
    advantages, groups = list(ragged_advantages(NUM_SAMPLES)), [i // 2 for i in range(NUM_SAMPLES)]
    before = {name: x.clone() for name, x in file_weights(model).items()}
    muon, norms = PlainMuon(model), []
    for start in range(0, NUM_SAMPLES, PER_MINI_BATCH):
        part = slice(start, min(start + PER_MINI_BATCH, NUM_SAMPLES))
        gradients, _ = reference_gradient(model, samples[part], groups[part], advantages[part])
        norms.append(muon.step(gradients))
    if ghost:
        muon.step({name: torch.zeros_like(x) for name, x in gradients.items()})
    return before, file_weights(model), norms[0]


def against_plain(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of a run's weights, of their movement, and of the first norm; {} but on the main rank."""
    layers, found = layers_of(config_of(*overrides)), {}
    with open_rig(family, *STEPS, *MUON, *overrides, samples=NUM_SAMPLES, layers=layers) as rig:
        old = np.concatenate([s.logprobs for s in rig.samples])
        results = rig.step(ragged_advantages(NUM_SAMPLES), drops=True, old=old)
        rig.backend.optim_step(StepKind.GHOST)
        weights = rig.weights()
        if rank == 0:
            before, after, norm = wanted(family, layers, True)
            after = {name: after[name] for name in weights}
            found["norm"] = abs(results[0].grad_norm / norm - 1)
            found["weights"] = relative_error(weights, after)
            moved = ({name: x[name] - before[name] for name in weights} for x in (weights, after))
            found["movement"] = relative_error(*moved)
    return found


def critic_against_plain(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of a critic's weights after one step, and of their movement."""
    given = (*STEPS, "train.samples_per_mini_batch=null", *MUON, *overrides)
    with open_critic(family, *given) as pair:
        critic, own = pair.critic, pair.batch
        before = {name: x.clone() for name, x in file_weights(pair.judge).items()}
        gradient, _ = naive(pair.judge, pair.samples, pair.groups, "token_mean")
        PlainMuon(pair.judge).step(gradient)
        after = file_weights(pair.judge)
        with critic._here():
            plan = critic.plan_training(own, own.facts.loss_tokens > 0, drops=True)
            own, (mini_batch,) = critic.fetch_rows(own, plan), plan.mini_batches
            returns, old = (np.concatenate(x) for x in targets(pair.samples))
            critic.accumulate(own, mini_batch, returns, old, plan.fingerprints()[0])
            critic.optim_step(mini_batch.kind)
            critic.schedule.gather_parameters()
            parameters = [dict(chunk.module.named_parameters()) for chunk in critic.chunks]
            weights = {k: x.clone() for k, x in export_weights(parameters, critic.shape, critic.topology)}
        moved = ({name: x[name] - before[name] for name in weights} for x in (weights, after))
        return {"weights": relative_error(weights, {k: after[k] for k in weights}), "movement": relative_error(*moved)}
