"""The arguments of one call, from the markup's parameters to JSON text, in fragments as they come."""

from __future__ import annotations

import json
from typing import Any, NoReturn

# Some answers wrap all arguments in one of these.
WRAPPERS = ("arguments", "input")


class ArgumentsWriter:
    """Every method returns the JSON text that it adds; all fragments together are one JSON object.

    properties: the names that the tool's schema knows, None if it has no schema. A value that is text is passed on as
    it comes; one that is JSON is kept until it is whole, since what is not JSON after all is text.
    """

    def __init__(self, properties: frozenset[str] | None = None) -> None:
        self._properties = properties
        self._num_written = 0
        self._name = ""
        self._is_text = False
        self._is_streamed = False
        self._pieces: list[str] = []
        self._wrapper: tuple[str, bool, str] | None = None  # name, is_text, value: it may be unwrapped

    def begin(self, name: str, *, is_text: bool) -> str:
        """A parameter begins. is_text: declared a text, rather than JSON or nothing."""
        written = self._write_wrapper()
        self._name, self._is_text, self._pieces = name, is_text, []
        self._is_streamed = is_text and not self._may_wrap(name)
        return written + self._key(name) + '"' if self._is_streamed else written

    def add(self, value: str) -> str:
        """Characters of the parameter's value."""
        if self._is_streamed:
            return _quote(value)[1:-1]
        self._pieces.append(value)
        return ""

    def end(self) -> str:
        """The parameter's value is whole."""
        if self._is_streamed:
            return '"'
        value = "".join(self._pieces)
        if self._may_wrap(self._name):
            self._wrapper = (self._name, self._is_text, value)
            return ""
        return self._key(self._name) + _value(value, self._is_text)

    def finish(self) -> str:
        """No more parameters come."""
        if self._wrapper is not None and (inner := self._unwrapped(self._wrapper[2])) is not None:
            return inner
        written = self._write_wrapper()
        return written + ("}" if self._num_written else "{}")

    def _key(self, name: str) -> str:
        self._num_written += 1
        return f"{'{' if self._num_written == 1 else ', '}{_quote(name)}: "

    def _may_wrap(self, name: str) -> bool:
        is_only_one = self._num_written == 0 and self._wrapper is None
        return is_only_one and name in WRAPPERS and bool(self._properties) and name not in (self._properties or ())

    def _write_wrapper(self) -> str:
        if self._wrapper is None:
            return ""
        name, is_text, value = self._wrapper
        self._wrapper = None
        return self._key(name) + _value(value, is_text)

    def _unwrapped(self, value: str) -> str | None:
        """The object in a wrapper, if it holds nothing but what the schema knows."""
        inner = _parse(value)
        if isinstance(inner, dict) and inner.keys() <= (self._properties or frozenset()):
            return value.strip()
        return None


def _value(value: str, is_text: bool) -> str:
    # JSON is passed on as it was written: numbers keep all their digits.
    return _quote(value) if is_text or _parse(value) is _NO_JSON else value.strip()


_NO_JSON = object()


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NO_JSON


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")  # Python would take NaN and Infinity


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
