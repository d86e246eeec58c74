"""The search for the beginning and end of each of the assistant's turns in a text that the chat template wrote.

1. The template renders the whole conversation. The text is cut at the end of the last turn.
2. A turn begins after the template's generation prompt (the text that asks for a turn). It ends
   with the token that the template writes after the turn's text. That token need not be the
   tokenizer's end of sequence: Gemma 3 writes ``<end_of_turn>``.
3. Some templates write no end, but the next speaker's first token (GLM-4.5: ``<|user|>``,
   ``<|observation|>``), which then ends the turn. After the last turn this token is added, as if a
   message followed.
4. If the template marks the assistant's text (``{% generation %}``), the marked texts are the
   turns.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl.data.chat import CONTENTS, TURN, Message, render_chat, said_in, source_of, text_behind_turn
from megatron_rl.errors import ConfigError, quoted

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Holds a rendered conversation and the character ranges of the assistant's turns in it.

    text: the whole conversation, to the end of the last turn.
    spans: [turns] (first, last + 1) character of each turn, the turn's ending token included.

    Example (ChatML without a system message): the text
    ``<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nyo<|im_end|>`` has the spans ((52,
    64),).
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Holds the texts that a tokenizer always turns into one token each.

    special: the special tokens, such as ``<|im_end|>``.
    added: the special tokens, and all other tokens that were added to the vocabulary.
    """

    special: tuple[str, ...]
    added: tuple[str, ...]


def words_of(tokenizer) -> Words:
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = [word for word in (*tokenizer.all_special_tokens, *special) if word]
    return Words(special=tuple(dict.fromkeys(special)), added=tuple({*special, *tokenizer.get_added_vocab()}))


class TurnFinder:
    """Finds the assistant's turns of one conversation.

    words: the special and added tokens of the tokenizer.
    prompt: the messages of the prompt.
    response: the messages after the prompt; the first and the last are the assistant's.
    beside: the template's variables other than the messages.
    where: the conversation's row and column, with which every error's message begins.
    """

    def __init__(
        self,
        tokenizer,
        words: Words,
        prompt: Sequence[Message],
        response: Sequence[Message],
        beside: Mapping[str, object],
        where: str,
    ) -> None:
        self._tokenizer, self._words, self._beside, self._where = tokenizer, words, beside, where
        self._messages = [*prompt, *response]
        own = [number for number, message in enumerate(self._messages) if message["role"] == "assistant"]
        self._own = [number for number in own if number >= len(prompt)]
        self._asked_turns = len(own) - len(self._own)
        self._prompts: dict[str, str] = {}  # generation prompts, by the role of the message before them

    def turns(self) -> Turns:
        """Return the conversation's text with the character ranges of its turns.

        Raises ConfigError if a turn cannot be found, or if the template leaves out the tool calls
        or the text of a turn.
        """
        for number in self._own:
            self._check_calls(number)
        marked = MARKS.search(source_of(self._tokenizer)) is not None
        found = self._marked() if marked else self._rendered()
        for number, (first, last) in zip(self._own, found.spans, strict=True):
            self._check_content(number, found.text[first:last])
        return found

    # ---- by the template's marks -----------------------------------------------------------------------------------

    def _marked(self) -> Turns:
        tokenizer, tools = self._tokenizer, self._beside.get("tools")
        self._render(self._messages)  # raises the error that names the row
        (text,), (spans,) = render_jinja_template(
            conversations=[[dict(message) for message in self._messages]],
            chat_template=tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **self._beside},
        )
        if len(spans) == self._asked_turns + len(self._own) + 1 and not self._without_words(text[slice(*spans[-1])]):
            spans = spans[:-1]  # Phi-3's <|endoftext|>, after the end of the last turn
        if len(spans) != self._asked_turns + len(self._own):
            raise ConfigError(
                f"{self._where}: the chat template's {{% generation %}} marks {len(spans)} texts, and the conversation "
                f"has {self._asked_turns + len(self._own)} messages of the assistant's; mark each of them once"
            )
        turns = []
        for number, (first, last) in zip(self._own, spans[self._asked_turns :], strict=True):
            prompt = self._render(self._messages[:number], prompt=True)
            turns.append((max(first, len(prompt)) if text.startswith(prompt) else first, last))
        return Turns(text=text[: turns[-1][1]], spans=tuple(turns))

    # ---- by rendering the messages before and after a turn ----------------------------------------------------------

    def _rendered(self) -> Turns:
        text, spans = self._render(self._messages), []
        first = self._first(text)
        for number, then in zip(self._own, self._own[1:], strict=False):
            following = self._messages[number + 1 : then]
            prompt = self._generation_prompt(self._messages[:then])
            stem = next((stem for stem in self._behind(number, following, prompt) if text.find(stem, first) >= 0), None)
            if stem is None:
                raise self._not_found(number)
            at = text.find(stem, first)
            spans.append((first, at + self._end_in(stem, number)))
            first = at + len(stem)
            first += self._shared(prompt, text[first:])
        text, last = self._end_of_last(text, first)
        return Turns(text=text, spans=(*spans, (first, last)))

    def _first(self, text: str) -> int:
        """Return the index in ``text`` of the first turn's first character, right after the prompt.

        A template may write less of the generation prompt before a finished turn than before a turn
        that is still to be generated. The turn then begins after the part that is written.
        """
        asked = self._messages[: self._own[0]]
        prompt = self._render(asked, prompt=True)
        before = prompt[: self._shared(prompt, self._render(asked))]
        own = self._prompts[asked[-1]["role"]] = prompt[len(before) :]
        if not text.startswith(before):
            raise ConfigError(
                f"{self._where}: the chat template changes the prompt's messages once message {self._own[0]} "
                "follows, so its turn cannot be found; mark the assistant's text by {% generation %} in the template, "
                "or end the row before that message"
            )
        return len(before) + self._shared(own, text[len(before) :])

    def _generation_prompt(self, messages: Sequence[Message]) -> str:
        """Return the generation prompt that the template writes after ``messages``.

        It is rendered once for each role of the last message, then reused.
        """
        role = messages[-1]["role"]
        if role not in self._prompts:
            prompt = self._render(messages, prompt=True)
            self._prompts[role] = prompt[self._shared(prompt, self._render(messages)) :]
        return self._prompts[role]

    def _shared(self, text: str, other: str) -> int:
        """Return the length of the common beginning of two texts, shortened if it would end inside an added token.

        Added tokens are the texts of ``Words.added``, such as ``<|im_end|>``, each of which is one token.
        """
        if other.startswith(text):
            return len(text)
        most = len(os.path.commonprefix([text, other]))
        cut = most
        for word in self._words.added:
            begin = text.rfind(word, 0, most + len(word) - 1)
            if 0 <= begin < most < begin + len(word):
                cut = min(cut, begin)
        return cut

    def _behind(self, number: int, following: Sequence[Message], prompt: str) -> Iterator[str]:
        """Yield the texts, at most two, by which the end of message ``number``'s turn can be found.

        The first is what the template writes after a turn without tool calls. A message with tool calls
        has a second: what the template writes after the last call, from the next special token on.

        following: the messages after the turn.
        prompt: the generation prompt, which is removed from the end of each text.
        """
        before, message, refused = self._messages[:number], self._messages[number], None
        try:
            behind = text_behind_turn(self._tokenizer, before, following, self._where, beside=self._beside)
            yield behind.removesuffix(prompt)
        except ConfigError as error:  # a template may refuse a tool's message after a turn without calls
            refused = error
        if message.get("tool_calls"):
            called = self._render([*before, _marked_call(message), *following], prompt=bool(following))
            called = called.rpartition(TURN)[2].removesuffix(prompt)
            if (special := self._special_in(called)) is not None:
                yield called[special[0] :]
        elif refused is not None:
            raise refused

    def _not_found(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self._where}: what the chat template writes behind message {number} does not show where its turn ends; "
            "mark the assistant's text by {% generation %} in the template"
        )

    def _end_in(self, behind: str, number: int) -> int:
        """Return the index in ``behind`` just after its first special token, which ends the turn.

        behind: what the template writes after the turn's text or last call.
        number: the message's number.

        Raises ConfigError if there is no special token.
        """
        special = self._special_in(behind)
        if special is None:
            raise ConfigError(
                f"{self._where}: the chat template writes no special token behind message {number}, so nothing would "
                f"end the turn ({quoted(behind)}); write one there, such as eos_token"
            )
        return special[1]

    def _end_of_last(self, text: str, first: int) -> tuple[str, int]:
        """Return (text up to the end of the last turn, index of that end).

        text: the whole rendered conversation.
        first: the index of the character at which the last turn begins.
        """
        number = self._own[-1]
        behind = next((x for x in self._behind(number, [], "") if text[first:].endswith(x)), None)
        if behind is None:
            raise self._not_found(number)
        text = text.removesuffix(behind)
        if self._special_in(behind) is None:
            role = "tool" if self._messages[number].get("tool_calls") else "user"
            before, answer = self._messages[:number], [{"role": role, "content": "0"}]
            behind = text_behind_turn(self._tokenizer, before, answer, self._where, beside=self._beside)
        last = len(text) + self._end_in(behind, number)
        return (text + behind)[:last], last

    def _special_in(self, text: str) -> tuple[int, int] | None:
        """Return (first, last + 1) character of the first special token in a text; None if there is none."""
        found = [(text.find(word), text.find(word) + len(word)) for word in self._words.special]
        return min((place for place in found if place[0] >= 0), key=lambda place: (place[0], -place[1]), default=None)

    # ---- both --------------------------------------------------------------------------------------------------------

    def _check_calls(self, number: int) -> None:
        """Raise ConfigError if the template leaves out the tool calls of message ``number``."""
        message = self._messages[number]
        calls = message.get("tool_calls")
        if calls and TURN not in self._render([*self._messages[:number], _marked_call(message)]):
            raise ConfigError(
                f"{self._where}: the chat template does not write the calls of message {number} ({calls!r:.80}), so "
                "the model would learn to say nothing there; take a template that writes each of tool_calls (gpt-oss' "
                "writes the first alone), write them into the content, or give it the content that it wants beside "
                f"calls: {CONTENTS}"
            )

    def _check_content(self, number: int, turn: str) -> None:
        """Raise ConfigError if ``turn`` lacks the text of message ``number``. Its thought (reasoning) may be lacking.

        turn: the text that the template wrote for the message.
        """
        message = self._messages[number]
        said = said_in(message).strip()
        if said not in turn:
            way = "empty it, as the template leaves it out beside tool_calls" if message.get("tool_calls") else ""
            raise ConfigError(
                f"{self._where}: the chat template changes an assistant's content: {quoted(said)} of message {number} "
                f"is not in {quoted(turn)}; {way or 'use a template that writes it unchanged'}"
            )

    def _without_words(self, text: str) -> str:
        """Return a text without special tokens, and without white space at its ends."""
        for word in self._words.special:
            text = text.replace(word, "")
        return text.strip()

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return render_chat(self._tokenizer, messages, self._where, add_generation_prompt=prompt, beside=self._beside)


def _marked_call(message: Message) -> Message:
    """Return a copy of a message with tool calls, in which the marker TURN replaces the last call's arguments."""
    *others, last = message["tool_calls"]
    function = last.get("function", last)
    arguments: object = {TURN: TURN}
    if isinstance(function.get("arguments"), str):
        arguments = json.dumps(arguments)
    function = {**function, "arguments": arguments}
    last = {**last, "function": function} if "function" in last else function
    return {**message, "tool_calls": [*others, last]}
