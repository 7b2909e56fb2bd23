"""An answer's text into reasoning, content and tool calls, while it is being written.

Nothing that was returned is ever taken back. Answers are read as the model meant them: a parameter without its
`string` attribute is JSON if it can be, a tool block may open within `<think>`, think markers may come twice, closing
tags may be missing, and text behind the tool block is dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace_engine.chat.arguments import ArgumentsWriter
from headrace_engine.chat.dsml import GAP
from headrace_engine.chat.tags import Tag, TagScanner

Tools = Mapping[str, frozenset[str] | None]  # tool -> names of its parameters, None if it has no schema


@dataclass(slots=True)
class CallPiece:
    """A part of the index-th call: its first piece has the name, the others add to the JSON text of its arguments."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What some text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    BLOCK = enum.auto()  # among calls, or behind them
    CALL = enum.auto()  # among parameters
    VALUE = enum.auto()  # in a parameter


class AnswerParser:
    """Feed it the text of one answer, in pieces of any size; `finish` it when no more text comes."""

    def __init__(self, *, is_thinking: bool, tools: Tools | None = None, max_calls: int | None = None) -> None:
        """is_thinking: the prompt ended with `<think>`. tools: those on offer; None: markup of tools is content.

        max_calls: calls beyond it are dropped.
        """
        self._state = _State.REASONING if is_thinking else _State.CONTENT
        self._tools = tools
        self._max_calls = max_calls
        self._scanner = TagScanner(with_tools=tools is not None)
        self._is_blank = True  # the content so far is white space
        self._gap = ""  # line breaks held back, in case a block of calls follows
        self._arguments = ArgumentsWriter()
        self._num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        return self._state is _State.REASONING

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, none of them open."""
        return self._num_calls > 0 and self._state is _State.BLOCK

    def feed(self, text: str) -> Parsed:
        out = Parsed()
        for part in self._scanner.feed(text):
            if isinstance(part, str):
                self._take_text(part, out)
            elif self._state in (_State.REASONING, _State.CONTENT):
                self._take_tag_of_text(part, out)
            else:
                self._take_tag_of_block(part, out)
        return out

    def finish(self, *, is_complete: bool) -> Parsed:
        """The end. is_complete: the model ended its answer itself, so that what it left open may be closed.

        Arguments that were cut off stay broken JSON: closed, they would be another call than the one meant.
        """
        out = Parsed()
        held = self._scanner.finish()
        if self._state in (_State.REASONING, _State.CONTENT) or not held.startswith(("<｜", "</｜")):
            self._take_text(held, out)
        self._release_gap(out)
        if is_complete:
            self._end_call(out)
        return out

    def _take_text(self, text: str, out: Parsed) -> None:
        if self._state is _State.VALUE:
            self._write(self._arguments.add(text), out)
        elif self._state in (_State.REASONING, _State.CONTENT):
            if self._tools is not None:
                text = self._gap + text
                self._gap = text[len(text.rstrip("\n")) :][-len(GAP) :]
                text = text[: len(text) - len(self._gap)]
            self._emit(text, out)

    def _emit(self, text: str, out: Parsed) -> None:
        if self._state is _State.REASONING:
            out.reasoning += text
        else:
            out.content += text
            self._is_blank = self._is_blank and not text.strip()

    def _release_gap(self, out: Parsed) -> None:
        gap, self._gap = self._gap, ""
        self._emit(gap, out)

    def _take_tag_of_text(self, tag: Tag, out: Parsed) -> None:
        is_reasoning = self._state is _State.REASONING
        opens_block = tag.kind == "calls" or (tag.kind == "invoke" and not is_reasoning)
        if opens_block and not tag.is_closing:
            if self._gap != GAP:
                self._release_gap(out)
            self._gap = ""
            self._state = _State.BLOCK
            self._take_tag_of_block(tag, out)
        elif tag.kind == "think" and (is_reasoning or self._is_blank):
            # A marker that says what is so already is dropped; in an answer that has begun it is a word like others.
            self._release_gap(out)
            self._state = _State.CONTENT if tag.is_closing else _State.REASONING
        else:
            self._take_text(tag.raw, out)

    def _take_tag_of_block(self, tag: Tag, out: Parsed) -> None:
        if tag.kind == "think":
            self._take_text(tag.raw, out)
        elif tag.kind == "parameter":
            self._end_value(out)
            name = tag.attributes.get("name")
            if not tag.is_closing and name is not None and self._state is _State.CALL:
                self._state = _State.VALUE
                self._write(self._arguments.begin(name, is_text=tag.attributes.get("string") == "true"), out)
        else:
            self._end_call(out)
            if tag.kind == "invoke" and not tag.is_closing and tag.attributes.get("name"):
                self._begin_call(tag.attributes["name"], out)

    def _begin_call(self, name: str, out: Parsed) -> None:
        self._state = _State.CALL
        self._arguments = ArgumentsWriter((self._tools or {}).get(name))
        self._num_calls += 1
        if self._is_wanted:
            out.calls.append(CallPiece(self._num_calls - 1, name, ""))

    def _end_value(self, out: Parsed) -> None:
        if self._state is _State.VALUE:
            self._write(self._arguments.end(), out)
            self._state = _State.CALL

    def _end_call(self, out: Parsed) -> None:
        self._end_value(out)
        if self._state is _State.CALL:
            self._write(self._arguments.finish(), out)
            self._state = _State.BLOCK

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _write(self, arguments: str, out: Parsed) -> None:
        if not arguments or not self._is_wanted:
            return
        if out.calls and out.calls[-1].index == self._num_calls - 1:
            out.calls[-1].arguments += arguments
        else:
            out.calls.append(CallPiece(self._num_calls - 1, None, arguments))


def tools_of(functions: list[dict[str, object]]) -> dict[str, frozenset[str] | None]:
    """The tools that functions of OpenAI's form declare."""
    tools: dict[str, frozenset[str] | None] = {}
    for function in functions:
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        tools[str(function["name"])] = frozenset(properties) if isinstance(properties, dict) else None
    return tools
