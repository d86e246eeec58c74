"""Workers that spoil their drafter's weights when they are told to, for a sync that must see it."""

import torch

from megatron_rl.rollout.weight_sync.receiver import Receiver


class SpoilingParameter(Receiver):
    """Changes one value of a parameter, at a message that the engine sends otherwise only with adapters."""

    def use_adapter(self) -> dict[str, float]:
        """Return the sum of each parameter of the drafter before the change."""
        sums = {name: x.double().sum().item() for name, x in self.get_draft_model().named_parameters() if x.numel()}
        parameter = next(x for x in self.get_draft_model().parameters() if x.numel())
        with torch.no_grad():
            parameter.view(-1)[3] += 0.5
        return sums


class SpoilingLayer(Receiver):
    """Gives a layer whose weight lies packed another one."""

    def use_adapter(self) -> None:
        layer = next(x for x in self.get_draft_model().modules() if hasattr(x, "cpu_linear") and not x.weight.numel())
        packed = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: packed(1.01 * x, weight, bias)
