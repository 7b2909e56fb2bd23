"""The grammar of a block of calls, for requests that want a call whatever the model thinks of it.

Lark's notation as llguidance reads it. Parameters come in the schema's order, optional ones may be left out; a text
is raw, everything else is JSON that keeps to its part of the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_engine.chat.dsml import GAP, Dialect
from headrace_engine.chat.prompt import DSML

_LINE, _MARK = "\n", '"'
_TEXT, _JSON = ' string="true">', ' string="false">'
_DEFINITIONS = ("$defs", "definitions")


def calls_grammar(dialect: Dialect, functions: Sequence[Mapping[str, Any]], max_calls: int | None) -> str:
    """Grammar of one call or more (exactly one if max_calls is 1) of these functions of OpenAI's form."""
    writer = _Writer(dialect)
    calls = DSML + dialect.calls
    repeated = "call" if max_calls == 1 else "call+"
    names = [writer.call(number, function) for number, function in enumerate(functions)]
    rules = [
        f"start: {_quote(GAP + '<' + calls + '>' + _LINE)} {repeated} {_quote('</' + calls + '>')}",
        f"call: {' | '.join(names)}",
        # Ends with the first closing tag, which no text can hold.
        f"text[suffix={_quote(writer.end)}]: /(?s:.*)/",
        *writer.rules,
    ]
    return "\n".join(rules) + "\n"


class _Writer:
    """Rules of calls and their parameters."""

    def __init__(self, dialect: Dialect) -> None:
        self._invoke = DSML + dialect.invoke
        self._parameter = DSML + dialect.parameter
        self.end = f"</{self._parameter}>"
        self.rules: list[str] = []
        # Of a function that does not say which parameters it has.
        begin = f"{_quote('<' + self._parameter + ' name=' + _MARK)} /[^{_MARK}<>\\n]+/"
        self.rules.append(f"any: {begin} ({self._raw(_MARK)} | {self._json(_MARK, {})}) {_quote(_LINE)}")

    def call(self, number: int, function: Mapping[str, Any]) -> str:
        """Writes the rules of a call of this function; returns the name of the first."""
        schema = function.get("parameters") or {}
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        parts = []
        for index, (name, part) in enumerate(properties.items()):
            parts.append(f"p{number}_{index}" + ("" if name in required else "?"))
            self._declare(f"p{number}_{index}", name, _part_of(schema, part))
        if not properties and schema.get("additionalProperties", True):
            parts = ["any*"]
        begin = _quote("<" + self._invoke + f' name="{function["name"]}">' + _LINE)
        # Without parameters prompts have an empty line.
        self.rules.append(
            f"c{number}: {begin} {' '.join(parts) or _quote(_LINE)} {_quote('</' + self._invoke + '>' + _LINE)}"
        )
        return f"c{number}"

    def _declare(self, rule: str, name: str, schema: Any) -> None:
        begin = f'<{self._parameter} name="{name}"'
        if _is_plain_text(schema):
            value = self._raw(begin)
        elif words := _words_of(schema):
            choice = " | ".join(map(_quote, words))
            value = f"{_quote(begin + _TEXT)} ({choice}) {_quote(self.end)}"
        else:
            value = self._json(begin, schema)
        self.rules.append(f"{rule}: {value} {_quote(_LINE)}")

    def _raw(self, begin: str) -> str:
        return f"{_quote(begin + _TEXT)} text"

    def _json(self, begin: str, schema: Any) -> str:
        return f"{_quote(begin + _JSON)} %json {json.dumps(schema)} {_quote(self.end)}"


def _part_of(schema: Mapping[str, Any], part: Any) -> Any:
    """A property's schema, with the definitions that it may refer to."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return {**part, **definitions} if isinstance(part, dict) and definitions else part


def _is_plain_text(schema: Any) -> bool:
    said = {"title", "description", "default", "examples", *_DEFINITIONS}
    return isinstance(schema, dict) and schema.get("type") == "string" and not (schema.keys() - said - {"type"})


def _words_of(schema: Any) -> list[str]:
    """The texts that a schema of texts allows, if it lists them."""
    words = schema.get("enum") if isinstance(schema, dict) and schema.get("type") == "string" else None
    is_usable = isinstance(words, list) and all(isinstance(word, str) and word for word in words)
    return list(words) if words and is_usable else []


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
