"""Records of the experts that an embedded model chooses for each token, for ``rollout.routing_replay=rollout``.

The embedded model is the engine: a mixture of experts that transformers runs in the trainer's
process. transformers' routers (5.19, models/mixtral and models/qwen3_moe) return logits, weights
and experts. A hook on each router keeps the experts of the latest forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_rl.errors import ConfigError


def routers_of(mlp: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a layer's router as a list of one module, or an empty list for a dense MLP.

    transformers names the router ``gate``, or ``router`` (gpt_oss).
    """
    return [module for name, module in mlp.named_children() if name in ("gate", "router")]


class RouterRecords:
    """Keeps the experts of each token of a batch while the batch is sampled.

    Call ``begin`` after the forward pass over the prompts, ``note`` after each step's pass, and
    ``of`` at the end.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Hook the model's routers. Raises ConfigError for a model without mixtures of experts."""
        layers = model.model.layers
        routers = [router for layer in layers for router in routers_of(layer.mlp)]
        if len(routers) < len(layers):
            raise ConfigError(
                f"rollout.routing_replay=rollout replays the experts of a mixture, and a {type(model).__name__} has "
                "none; set rollout.routing_replay=off"
            )
        self._latest: list[torch.Tensor | None] = [None] * len(layers)
        self._prompts: torch.Tensor | None = None
        self._steps: torch.Tensor | None = None
        for number, router in enumerate(routers):
            router.register_forward_hook(lambda module, arguments, output, number=number: self._keep(number, output))

    def _keep(self, number: int, output: tuple[torch.Tensor, ...]) -> None:
        self._latest[number] = output[2]

    def _pass(self, rows: int) -> torch.Tensor:
        """Return the experts of the latest forward pass, over ``rows`` prompts or samples.

        int16 [rows, tokens per row, layers, top_k].
        """
        return torch.stack([x.to(torch.int16).view(rows, -1, x.shape[-1]) for x in self._latest], dim=2)

    def begin(self, num_prompts: int, num_rows: int, max_steps: int) -> None:
        """Record the experts that the routers chose in the forward pass over the prompts.

        The experts of all response tokens are set to −1.

        num_prompts: the number of prompts in the pass.
        num_rows: the number of samples.
        max_steps: the maximum of response tokens of a sample.
        """
        self._prompts = self._pass(num_prompts)
        shape = (max_steps, num_rows, *self._prompts.shape[2:])
        self._steps = torch.full(shape, -1, dtype=torch.int16, device=self._prompts.device)

    def note(self, step: int, rows: torch.Tensor, place: torch.Tensor | None, num_cached: int) -> None:
        """Record the experts that the latest forward pass chose for its input.

        The input was one token per row of the cache, drawn at decoding step ``step``.

        rows: int64 [R], the indices of the running rows (samples).
        place: int64 [R], the row of the cache of each of them; None: their own, in order.
        num_cached: the number of the cache's rows.
        """
        experts = self._pass(num_cached)[:, 0]
        self._steps[step, rows] = experts if place is None else experts[place]

    def of(
        self, prompt_of_row: Sequence[int], prompt_lengths: Sequence[int], lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """Return the experts of each row (sample), int16 [prompt + response, layers, top_k]; −1 for the last token.

        prompt_of_row: the index of each row's prompt in the batch.
        prompt_lengths: the number of tokens of each row's prompt, without padding.
        lengths: the number of tokens of each row's response.
        """
        prompts, steps = self._prompts.cpu().numpy(), self._steps.cpu().numpy()
        self._prompts = self._steps = None
        unknown = np.full((1, *prompts.shape[2:]), -1, dtype=np.int16)
        experts = []
        for row, (prompt, prompt_length, length) in enumerate(zip(prompt_of_row, prompt_lengths, lengths, strict=True)):
            own = prompts[prompt, prompts.shape[1] - prompt_length :]
            experts.append(np.concatenate([own, steps[: length - 1, row], unknown]))
        return experts
