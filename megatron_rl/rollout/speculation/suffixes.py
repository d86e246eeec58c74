"""An index of one prompt's earlier answers: after which tokens came which, for contexts of any length.

The index is a suffix automaton (Blumer et al. 1985, Theor. Comput. Sci. 40) of several sequences. Each
of its states stands for a set of contexts that end at the same places of the answers. Adding a token
costs amortised constant time, and so does following a row's (sample's) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

START = -1  # precedes every answer, so that an empty prefix has a context


class SuffixIndex:
    """Holds the answers to one prompt, and finds where a context occurs in them.

    Example: after ``add([5, 6, 7])`` and ``add([8, 6, 9])``, a ``Cursor`` drafts 7 after [5, 6], and 9
    after [4, 6], since the latest answer has 9 after 6.
    """

    def __init__(self) -> None:
        # By state: the length of its longest context, the state of the longest shorter context that occurs
        # elsewhere too, and the next state by token.
        self._length, self._link, self._next = [0], [-1], [{}]
        # By state: the answers that have its contexts, the latest of them, and where in it they end first.
        self._count, self._latest, self._end = [0], [-1], [0]
        self.num_answers = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add one answer's token ids."""
        state, answer = 0, self.num_answers
        for end, token in enumerate((START, *tokens)):
            state = context = self._extend(state, int(token))
            # A context that was met in this answer before has had its shorter contexts counted as well.
            while context and self._latest[context] != answer:
                self._count[context] += 1
                self._latest[context], self._end[context] = answer, end
                context = self._link[context]
        self.num_answers += 1

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and the length of the longest context that occurs, after one more token.

        state, length: the same before the token. The empty context is (0, 0).
        """
        while length and length <= self._length[self._link[state]]:  # an answer was added, and has split the state
            state = self._link[state]
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return 0, 0
        return self._next[state][token], length + 1

    def continuation(self, state: int, length: int, most: int) -> list[int]:
        """Return at most ``most`` tokens that follow a context: each the one that the most answers have there.

        Among equals it is the one that the latest answer has, and that came there first.

        state, length: the context, as ``follow`` returned it.
        """
        tokens: list[int] = []
        while length and length <= self._length[self._link[state]]:
            state = self._link[state]
        while len(tokens) < most and (following := self._next[state]):
            _, _, _, token, state = max(
                (self._count[to], self._latest[to], -self._end[to], token, to) for token, to in following.items()
            )
            tokens.append(token)
        return tokens

    def _extend(self, last: int, token: int) -> int:
        """Add a token to the context ``last``, an answer's prefix; return the state of the longer prefix."""
        known = self._next[last].get(token)
        if known is not None:
            return known if self._length[known] == self._length[last] + 1 else self._split(last, token, known)
        new = self._state(self._length[last] + 1, {})
        while last != -1 and token not in self._next[last]:
            self._next[last][token] = new
            last = self._link[last]
        if last == -1:
            self._link[new] = 0
            return new
        known = self._next[last][token]
        exact = self._length[known] == self._length[last] + 1
        self._link[new] = known if exact else self._split(last, token, known)
        return new

    def _split(self, last: int, token: int, known: int) -> int:
        """Give the shorter contexts of a state their own state, which they need since they now end elsewhere too."""
        short = self._state(self._length[last] + 1, dict(self._next[known]))
        for counts in (self._count, self._latest, self._end):
            counts[short] = counts[known]
        self._link[short], self._link[known] = self._link[known], short
        while last != -1 and self._next[last].get(token) == known:
            self._next[last][token] = short
            last = self._link[last]
        return short

    def _state(self, length: int, following: dict[int, int]) -> int:
        self._length.append(length)
        self._link.append(0)
        self._next.append(following)
        self._count.append(0)
        self._latest.append(-1)
        self._end.append(0)
        return len(self._length) - 1


class Cursor:
    """Follows the tokens of one row (sample), and drafts what may come next.

    matched: the length of the longest end of the row's tokens that occurs in the index, the start of
        the answer counted as a token.
    """

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._restart()

    def _restart(self) -> None:
        self._num_answers, self._num_seen = self._index.num_answers, 0
        self._state, self.matched = self._index.follow(0, 0, START)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` likely next tokens, none if the row's last token is new to the index.

        tokens: the row's tokens so far. They begin with the tokens of the call before.
        """
        if self._num_answers != self._index.num_answers:  # a longer context may now occur
            self._restart()
        index, state, matched = self._index, self._state, self.matched
        for token in tokens[self._num_seen :]:
            state, matched = index.follow(state, matched, int(token))
        self._state, self.matched, self._num_seen = state, matched, len(tokens)
        return index.continuation(state, matched, most) if matched else []
