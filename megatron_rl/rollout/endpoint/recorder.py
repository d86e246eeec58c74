"""The record of one agent's session: its turns, which turn extends which, and the sample that they become. Pure.

1. A request that extends a recorded conversation keeps the recorded tokens. The request's context
   is the earlier turn's context, the earlier turn's sampled tokens, and the tokens of the new
   messages or text.
2. Conversations that share a beginning are branches of one tree of turns. The session's sample is
   one branch: all turns from the beginning to the turn that was answered last. A session has only
   one sample, since a group has a fixed number of samples.
3. In that sample each sampled token carries loss, and no other token does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

# A conversation is a text, token ids, or messages as canonical JSON texts. All are sequences that have prefixes.
Conversation = str | tuple
Frame = tuple[str, str]


def digests(conversation: Conversation, lengths: Iterable[int]) -> list[tuple[int, bytes]]:
    """Return (n, digest of the first n elements of a conversation) for each n of ``lengths``, in linear time.

    lengths: ascending. An element is a message, a character or a token.
    """
    state, beginnings, start = hashlib.blake2b(digest_size=16), [], 0
    for end in lengths:
        part = conversation[start:end]
        text = part if isinstance(part, str) else "".join(f"{piece}\n" for piece in part)  # JSON has no newline
        state.update(text.encode())
        beginnings.append((end, state.digest()))
        start = end
    return beginnings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Holds one answered request.

    frame: the request's kind: ("chat", digest of its tools), ("text", "") or ("ids", ""). A turn
        extends only turns of the same kind.
    parent: the turn that this turn extends; None if it begins a conversation.
    known: (length, digest) of the whole conversation with the reply (``digests``). The length is in
        messages for "chat", in characters for "text", in tokens for "ids".
    new_ids: the tokens between the parent's last token and the first sampled token. Without a
        parent, the whole prompt.
    ids, logprobs: [T], the sampled tokens with the stop token, and their log-probs.
    weight_versions: (version, number of tokens) pairs in order, as in Rollout.
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
        """Return the turns from the first turn of the conversation to this turn."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def token_ids(self) -> tuple[int, ...]:
        """Return the context of this turn, followed by its sampled tokens."""
        return tuple(token for turn in self.path() for token in (*turn.new_ids, *turn.ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Holds the sample of a session.

    prompt_ids: the tokens of the first request.
    response_ids, logprobs: [T], all tokens after ``prompt_ids``, and their log-probs; 0.0 for
        tokens that were not sampled.
    loss_mask: [T], whether each token was sampled, and so carries loss.
    weight_versions: (version, number of tokens) pairs in order. Tokens that were not sampled have
        the version of the token before them.
    finish_reason: "stop" or "length", from the last turn.

    Example: the prompt is (5,), then come a turn (8, 0), a tool's answer (4,) and a turn (9, 0).
    Then ``response_ids=(8, 0, 4, 9, 0)`` and ``loss_mask=(True, True, False, True, True)``.
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
        self._lengths: dict[Frame, tuple[int, ...]] = {}  # frame → lengths of its turns' conversations, ascending
        self._known: dict[tuple[Frame, tuple[int, bytes]], list[Turn]] = {}

    def parent_of(self, frame: Frame, conversation: Conversation) -> Turn | None:
        """Return the turn that a request extends, or None if it begins a conversation.

        The turn with the longest matching conversation is returned; if several are equally long,
        the latest. The request must add something to the turn's conversation, which ends with the
        turn's answer. One exception: a request of text or token ids may add nothing, if
        ``max_tokens`` cut off the answer; it then continues the answer. The time is linear in the
        conversation's length and the number of turns. Another thread may add a turn during the call.

        frame: the request's kind and tools (see ``Turn``).
        conversation: what the request asks to continue: a text, token ids, or messages as JSON
            texts.
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
        """Return the turns that no other turn extends, in the order of their answers."""
        parents = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in parents]

    def last_branch(self) -> Branch:
        """Return the session's sample: the turn that was answered last and the turns that it extends, joined.

        Raises IndexError if there are no turns.
        """
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
