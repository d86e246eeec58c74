"""The section ``preference``: the loss over pairs of a chosen and a rejected response, and the pairs' columns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError

OF_A_POLICY = ("dpo", "hinge", "ipo", "simpo")
PAIR_LOSSES = (*OF_A_POLICY, "bradley_terry")
WITH_REFERENCE = ("dpo", "hinge", "ipo")
WITH_MARGIN = ("dpo", "simpo", "bradley_terry")
WITH_SMOOTHING = ("dpo", "simpo")


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Makes the steps of `sft` train on pairs of responses (docs/supervised.md#preference-pairs-dpo-ipo-simpo).

    Each pair has a chosen and a rejected response. `bradley_terry` trains a reward model: a value head
    replaces the LM head (docs/supervised.md#reward-models).
    """

    loss: str = "none"
    """`none`: imitation, no pairs; `dpo`, `hinge`, `ipo`, `simpo`: train a policy; `bradley_terry`: a reward model."""
    beta: Annotated[float, Range(0, 1000, open_low=True)] = 0.1
    """β of `dpo`, `hinge` and `simpo`, τ of `ipo`."""
    margin: Annotated[float, Range(-1000, 1000)] = 0.0
    """`simpo`, `dpo`, `bradley_terry`: γ, by which a chosen response's reward should exceed the rejected one's."""
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0
    """`dpo`, `simpo`: ε, the share of pairs assumed to be labelled the wrong way round."""
    chosen_key: str = "chosen"
    """Column of the chosen response: a text, or messages, which may begin with the prompt's messages."""
    rejected_key: str = "rejected"
    """Column of the rejected response: a text or messages, as in `preference.chosen_key`."""

    def __post_init__(self) -> None:
        choose("preference.loss", self.loss, ("none", *PAIR_LOSSES))
        readers = {"margin": WITH_MARGIN, "label_smoothing": WITH_SMOOTHING, "beta": OF_A_POLICY}
        for name, losses in readers.items():
            value, neutral = vars(self)[name], {f.name: f.default for f in dataclasses.fields(self)}[name]
            if value != neutral and self.loss not in losses:
                raise ConfigError(
                    f"preference.{name}={value:g} is read by preference.loss={', '.join(losses)}, and the loss is "
                    f"{self.loss}; leave it at {neutral:g}, or choose another loss"
                )

    @property
    def is_on(self) -> bool:
        """Return whether the steps of ``sft`` train on pairs."""
        return self.loss != "none"

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss reads a reference policy's log-probs."""
        return self.loss in WITH_REFERENCE

    @property
    def trains_reward_model(self) -> bool:
        """Return whether the run trains a reward model in place of a policy."""
        return self.loss == "bradley_terry"
