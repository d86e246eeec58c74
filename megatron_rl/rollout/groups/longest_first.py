"""The start order ``longest_first``: a rollout first starts the groups whose responses are expected to be longest.

An engine samples a limited number of responses at once. A long response that is started last is
sampled nearly alone at the rollout's end. If the longest are started first (Graham's
longest-processing-time rule, SIAM J. Appl. Math. 17(2), 1969), short responses fill the gaps at the
end. A sample's seed does not depend on the order, so the order changes no random draw.

The order is the same on every rank, since it depends only on facts that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.types import BatchFacts, Prompt


class LongestFirst:
    """Orders a rollout's groups by the response lengths of the same prompts in earlier rollouts.

    New prompts come first, the longest prompt first. The others follow, the longest expected
    response first. The expected length is that of the longest response in the prompt's latest group,
    in any epoch.

    Example: the groups 0 to 3 of a rollout have prompts of 3, 4, 3 and 8 tokens. The expected
    response lengths are 5 for group 0 and 9 for group 2. The prompts of groups 1 and 3 are new.
    The order is [3, 1, 2, 0].
    """

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}  # data row → tokens of the longest response in its latest group

    def arrange(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]:
        """Return ``prompts`` in the order in which their groups are to be started.

        Prompts without a known response length come first, since any of them may have the longest.
        They are sorted by the length of the prompt. The other prompts follow, sorted by the length
        of their latest responses. Both sorts put the longest first, and the lower group number
        first among equals.

        prompts: a group's number in the rollout → its prompt.
        """
        places = sorted(sorted(prompts), key=lambda place: self._key(prompts[place]))
        return {place: prompts[place] for place in places}

    def _key(self, prompt: Prompt) -> tuple[bool, int]:
        length = self.lengths.get(prompt.row)
        return (False, -len(prompt.token_ids)) if length is None else (True, -length)

    def note(self, prompts: Mapping[int, Prompt], facts: BatchFacts) -> None:
        """Remember the length of each group's longest response, in tokens.

        prompts: a group's number in the rollout → its prompt, for the groups of all ranks.
        facts: the samples' lengths, and in ``facts.groups`` the number of each sample's group.
        """
        for place in np.unique(facts.groups).tolist():
            longest = facts.response_tokens[facts.groups == place].max()
            self.lengths[prompts[place].row] = int(longest)

    def state(self) -> dict[str, int]:
        return dict(self.lengths)

    def load_state(self, lengths: Mapping[str, int]) -> None:
        self.lengths = dict(lengths)
