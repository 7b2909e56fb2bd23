"""An answer's text, piece by piece, into texts and tags. Holds back what may be the beginning of a tag."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headrace_engine.chat.prompt import DSML, END_THINK, THINK

MAX_TAG_CHARS = 1024  # longer than any name; what is longer is text
Kind = Literal["think", "calls", "invoke", "parameter"]

# Some names of the outer tag are not in any prompt; models write them now and then.
_KINDS: dict[str, Kind] = {
    "tool_calls": "calls",
    "toolcalls": "calls",
    "tool": "calls",
    "calls": "calls",
    "invoke": "invoke",
    "parameter": "parameter",
}
_REST = r'(?:[^<>"\n]|"[^"\n]*")*'
_DSML_TAG = re.compile(rf"<(/?){DSML}\s*({'|'.join(_KINDS)})(?=[\s>])({_REST})>")
_OPEN_DSML_TAG = re.compile(rf'</?{DSML}{_REST}(?:"[^"\n]*)?')
_ATTRIBUTE = re.compile(r'\s([a-z]+)\s*=\s*"([^"]*)"')


@dataclass(frozen=True)
class Tag:
    """raw: the characters it was written with."""

    kind: Kind
    is_closing: bool
    raw: str
    attributes: dict[str, str]


class TagScanner:
    """Splits a text that comes in pieces. The texts and raw tags that it returns join to what it was given."""

    def __init__(self, *, with_tools: bool) -> None:
        """with_tools: whether the tags of DSML are tags; otherwise they are text."""
        self._with_tools = with_tools
        markers = [THINK, END_THINK]
        if with_tools:
            markers += ["<" + DSML, "</" + DSML]
        self._beginnings = frozenset(marker[:length] for marker in markers for length in range(1, len(marker) + 1))
        self._held = ""

    def feed(self, piece: str) -> list[str | Tag]:
        text = self._held + piece
        self._held = ""
        parts: list[str | Tag] = []
        done = 0  # what is before this is in parts
        start = text.find("<")
        while start >= 0:
            tag = self._tag_at(text, start)
            if tag is not None:
                if start > done:
                    parts.append(text[done:start])
                parts.append(tag)
                done = start + len(tag.raw)
                start = text.find("<", done)
            elif self._may_begin_tag(text[start : start + MAX_TAG_CHARS + 1]):
                self._held = text[start:]
                text = text[:start]
                break
            else:
                start = text.find("<", start + 1)
        if done < len(text):
            parts.append(text[done:])
        return parts

    def finish(self) -> str:
        """What was held back: the text ends within what could have been a tag."""
        held, self._held = self._held, ""
        return held

    def _tag_at(self, text: str, start: int) -> Tag | None:
        for marker, is_closing in ((THINK, False), (END_THINK, True)):
            if text.startswith(marker, start):
                return Tag("think", is_closing, marker, {})
        match = _DSML_TAG.match(text, start) if self._with_tools else None
        if match is None:
            return None
        return Tag(_KINDS[match[2]], bool(match[1]), match[0], dict(_ATTRIBUTE.findall(match[3])))

    def _may_begin_tag(self, end: str) -> bool:
        """Whether a text that goes on may become a tag. end: from its "<" on."""
        if end in self._beginnings:
            return True
        return self._with_tools and len(end) <= MAX_TAG_CHARS and _OPEN_DSML_TAG.fullmatch(end) is not None
