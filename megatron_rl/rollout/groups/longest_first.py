"""Longest first: a rollout's groups that are expected to be longest are started first.

An engine samples so many responses at once; a long one that is started last is sampled nearly alone
at the rollout's end. Started longest first (Graham's longest-processing-time rule, SIAM J. Appl.
Math. 17(2), 1969), the short ones fill the gaps at the end. A sample's seed depends on no order, so
the order moves no draw.

Pure, and the same on every rank: lengths come from facts that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.types import BatchFacts, Prompt


class LongestFirst:
    """Orders the groups of rollouts, and remembers for each row of the data how long its group came last.

    Example: groups at places 0 to 3, whose rows came with 5 tokens at most, never, with 9, and
    never, and whose prompts have 3, 4, 3 and 8 tokens: the order is [3, 1, 2, 0].
    """

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}  # by row: the longest response's tokens, when its prompt was sampled last

    def arrange(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]:
        """Return prompts by place, in the order in which their groups are to be started.

        First the groups of rows without a known length, since any of them may be the longest, by
        the tokens of their prompts; then the others by their length. The longest comes first, and
        of equal ones the lower place.
        """
        places = sorted(sorted(prompts), key=lambda place: self._key(prompts[place]))
        return {place: prompts[place] for place in places}

    def _key(self, prompt: Prompt) -> tuple[bool, int]:
        length = self.lengths.get(_row(prompt))
        return (False, -len(prompt.token_ids)) if length is None else (True, -length)

    def note(self, prompts: Mapping[int, Prompt], facts: BatchFacts) -> None:
        """Remember how long groups came. prompts: by place, of all ranks; ``facts.groups`` are places."""
        for place in np.unique(facts.groups).tolist():
            longest = facts.response_tokens[facts.groups == place].max()
            self.lengths[_row(prompts[place])] = int(longest)

    def state(self) -> dict[str, int]:
        return dict(self.lengths)

    def load_state(self, lengths: Mapping[str, int]) -> None:
        self.lengths = dict(lengths)


def _row(prompt: Prompt) -> str:
    """Return the data's row, which is the prompt's id without its epoch."""
    return prompt.prompt_id.partition("@")[0]
