"""The record of one agent's session: its turns, how they chain, and the sample that they become. Pure.

1. A request that extends a recorded conversation keeps the recorded tokens: its context is the
   earlier turn's context, the earlier turn's sampled tokens, and the tokens of what is new.
2. Conversations that share a beginning are branches of one tree. The branch of the turn that was
   answered last is the session's sample: a group has a fixed number of samples.
3. Of that sample each sampled token carries loss, and no other token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

# A conversation is a text, token ids, or messages, each as canonical JSON: any sequence with prefixes.
Conversation = str | tuple
Frame = tuple[str, str]


def digests(conversation: Conversation, lengths: Iterable[int]) -> list[tuple[int, bytes]]:
    """Return (length, digest) of a conversation's beginnings of these lengths, which ascend; in linear time."""
    state, beginnings, start = hashlib.blake2b(digest_size=16), [], 0
    for end in lengths:
        part = conversation[start:end]
        text = part if isinstance(part, str) else "".join(f"{piece}\n" for piece in part)  # JSON has no line's end
        state.update(text.encode())
        beginnings.append((end, state.digest()))
        start = end
    return beginnings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Holds one answered request.

    frame:    the form and what is rendered beside the conversation, such as ("chat", the tools'
              digest); only turns of one frame chain.
    parent:   the turn that it extends, or None.
    known:    (length, digest) of the whole conversation, the reply included (``digests``).
    new_ids:  the tokens between the parent's last and the first sampled one; of a turn without a
              parent, its prompt.
    ids, logprobs: [T] what was sampled, its stop token included.
    weight_versions: (version, tokens) in order, as in Rollout.
    finish_reason: "stop" or "length".
    """

    frame: Frame
    parent: Turn | None
    known: tuple[int, bytes]
    new_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[tuple[int, int], ...]
    finish_reason: str

    def path(self) -> list[Turn]:
        """Return the turns from the first one to this."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def token_ids(self) -> tuple[int, ...]:
        """Return the context and the sampled tokens of this turn and of all before it."""
        return tuple(token for turn in self.path() for token in (*turn.new_ids, *turn.ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Holds the sample of a session.

    prompt_ids: the tokens of its first request.
    response_ids, logprobs, loss_mask: [T], as in Rollout; log-probs are 0.0 where nothing was
        sampled.
    weight_versions: as in Rollout; tokens that were not sampled count to the turn before them.

    Example: prompt (5,), a turn (8, 0), a tool's (4,), a turn (9, 0): ``response_ids=(8, 0, 4, 9,
    0)``, ``loss_mask=(True, True, False, True, True)``.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    weight_versions: tuple[tuple[int, int], ...]
    finish_reason: str


class Record:
    """Holds the turns of a session, in the order in which they were answered."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._lengths: dict[Frame, tuple[int, ...]] = {}  # of the turns' conversations, ascending
        self._known: dict[tuple[Frame, tuple[int, bytes]], list[Turn]] = {}

    def parent_of(self, frame: Frame, conversation: Conversation) -> Turn | None:
        """Return the turn that a request extends: the one with the longest conversation, the latest of equals.

        The request must say something new, unless it lets a text go on that ``max_tokens`` had cut
        off. It takes time linear in the conversation and the number of turns, and may be called
        while another thread adds one.
        """
        lengths = [length for length in self._lengths.get(frame, ()) if length <= len(conversation)]
        for known in reversed(digests(conversation, lengths)):
            for turn in reversed(self._known.get((frame, known), ())):
                if known[0] < len(conversation) or (frame[0] != "chat" and turn.finish_reason == "length"):
                    return turn
        return None

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._lengths[turn.frame] = tuple(sorted({*self._lengths.get(turn.frame, ()), turn.known[0]}))
        self._known.setdefault((turn.frame, turn.known), []).append(turn)

    def leaves(self) -> list[Turn]:
        """Return the turns that no other turn extends, in order."""
        parents = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in parents]

    def last_branch(self) -> Branch:
        """Return the branch of the turn that was answered last. Raises IndexError where there is none."""
        path = self.turns[-1].path()
        ids: list[int] = []
        logprobs: list[float] = []
        mask: list[bool] = []
        versions: list[tuple[int, int]] = []
        for number, turn in enumerate(path):
            between = turn.new_ids if number else ()
            ids += [*between, *turn.ids]
            logprobs += [*[0.0] * len(between), *turn.logprobs]
            mask += [*[False] * len(between), *[True] * len(turn.ids)]
            for version, count in [*([(versions[-1][0], len(between))] if between else []), *turn.weight_versions]:
                if versions and versions[-1][0] == version:
                    count += versions.pop()[1]
                versions.append((version, count))
        return Branch(
            prompt_ids=path[0].new_ids,
            response_ids=tuple(ids),
            logprobs=tuple(logprobs),
            loss_mask=tuple(mask),
            weight_versions=tuple(versions),
            finish_reason=path[-1].finish_reason,
        )
