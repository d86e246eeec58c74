"""The answers that earlier rollouts gave to each prompt, from which later rollouts' tokens are drafted.

The history decides which tokens are drafted, and so how fast a run is. It decides no sampled token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megatron_rl.rollout.speculation.suffixes import SuffixIndex

MAX_TOKENS = 8_000_000  # 32 MB
VISITS = 2  # a prompt's latest rollouts whose answers are kept
MAX_ANSWERS = 64  # to a prompt in one rollout; of more, the latest are kept


def key_of(prompt: Sequence[int]) -> str:
    """Return a prompt's key, a hash of its token ids. So equal prompts share their answers."""
    return hashlib.blake2b(np.asarray(prompt, dtype="<i4").tobytes(), digest_size=16).hexdigest()


class History:
    """Keeps the answers of each prompt's latest rollouts, within a total number of tokens.

    If there are more tokens, the prompts that were used least recently are dropped.

    max_tokens: the most tokens of all answers together.
    visits: the number of a prompt's latest rollouts that are kept.
    """

    def __init__(self, *, max_tokens: int = MAX_TOKENS, visits: int = VISITS) -> None:
        self._max_tokens, self._visits = max_tokens, visits
        # A prompt's key → for each of its latest rollouts, the oldest first: its number, and the distinct answers.
        self._answers: OrderedDict[str, list[tuple[int, list[np.ndarray]]]] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, key: str) -> bool:
        """Return whether a prompt has kept answers."""
        return key in self._answers

    def answers(self, key: str) -> list[np.ndarray]:
        """Return the kept answers to a prompt, int32 arrays, the oldest first. The prompt counts as used."""
        if key not in self._answers:
            return []
        self._answers.move_to_end(key)
        return [answer for _, answers in self._answers[key] for answer in answers]

    def index(self, key: str) -> SuffixIndex:
        """Return a new index of the kept answers to a prompt."""
        index = SuffixIndex()
        for answer in self.answers(key):
            index.add(answer.tolist())
        return index

    def add(self, key: str, answers: Iterable[Sequence[int]], *, visit: int | None = None) -> None:
        """Add answers to a prompt, of its latest rollout. The oldest rollout beyond ``visits`` is dropped.

        visit: the rollout's number. Answers with the number of the prompt's latest rollout join it. None:
            a new rollout.
        """
        latest = {array.tobytes(): array for array in (np.array(answer, dtype=np.int32) for answer in answers)}
        visits = self._answers.pop(key, [])
        self.num_tokens -= _size(visits)
        if visit is None:
            visit = visits[-1][0] + 1 if visits else 0
        kept = [(number, [answer for answer in old if answer.tobytes() not in latest]) for number, old in visits]
        if kept and kept[-1][0] == visit:
            kept[-1][1].extend(latest.values())
        else:
            kept.append((visit, [*latest.values()]))
        if kept := [(number, answers[-MAX_ANSWERS:]) for number, answers in kept[-self._visits :] if answers]:
            self._answers[key] = kept
            self.num_tokens += _size(kept)
        while self.num_tokens > self._max_tokens:
            self.num_tokens -= _size(self._answers.popitem(last=False)[1])

    def state(self) -> dict[str, np.ndarray]:
        """Return the history as arrays, which ``load_state`` takes."""
        lines = [
            (key, number, answer)
            for key, visits in self._answers.items()
            for number, answers in visits
            for answer in answers
        ]
        return {
            "keys": np.array([key for key, _, _ in lines], dtype="U32"),
            "visits": np.array([number for _, number, _ in lines], dtype=np.int64),
            "lengths": np.array([len(answer) for _, _, answer in lines], dtype=np.int64),
            "tokens": np.concatenate([np.zeros(0, dtype=np.int32), *(answer for _, _, answer in lines)]),
        }

    def load_state(self, *states: Mapping[str, np.ndarray]) -> None:
        """Replace the history by saved ones, several if more ranks saved than now read.

        states: results of ``state``; {} from a run without a history.
        """
        self._answers.clear()
        self.num_tokens = 0
        for state in filter(None, states):
            groups: dict[tuple[str, int], list[np.ndarray]] = {}
            ends = np.cumsum(state["lengths"])
            parts = (values.tolist() for values in (state["keys"], state["visits"], ends - state["lengths"], ends))
            for key, visit, start, end in zip(*parts, strict=True):
                groups.setdefault((key, visit), []).append(state["tokens"][start:end])
            for (key, visit), answers in groups.items():
                self.add(key, answers, visit=visit)


def _size(visits: Sequence[tuple[int, Sequence[np.ndarray]]]) -> int:
    return sum(len(answer) for _, answers in visits for answer in answers)
