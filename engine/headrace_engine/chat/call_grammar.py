"""Grammars of calls: those that a request insists on, those of functions that are `strict`, those beside a form.

Lark's notation as llguidance reads it. Parameters come in the schema's order, optional ones may be left out; a text
is raw, everything else is JSON that keeps to its part of the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_engine.chat.dsml import GAP, Dialect
from headrace_engine.chat.errors import ChatError
from headrace_engine.chat.prompt import DSML, END_THINK, THINK

_LINE, _MARK = "\n", '"'
_TEXT, _JSON = ' string="true">', ' string="false">'
_DEFINITIONS = ("$defs", "definitions")
FORM = "form"  # the name of a grammar that another one refers to
_SAYS = {"title", "description", "$schema", *_DEFINITIONS}  # keywords that hold nobody to anything
_OF_STRICT = {"type", "properties", "required", "additionalProperties", *_SAYS}


def calls_grammar(dialect: Dialect, functions: Sequence[Mapping[str, Any]], max_calls: int | None) -> str:
    """Grammar of one call or more (exactly one if max_calls is 1) of these functions of OpenAI's form."""
    opening = f"start: {_quote(GAP + '<' + DSML)} block"
    return "\n".join([opening, *_block(dialect, functions, max_calls)]) + "\n"


def calls_or_form_grammar(dialect: Dialect, functions: Sequence[Mapping[str, Any]], max_calls: int | None) -> str:
    """Grammar of an answer behind the thought: what the grammar `form` says, or calls of these functions."""
    opening = f"start: @{FORM} | {_quote(GAP + '<' + DSML)} block"
    return "\n".join([opening, *_block(dialect, _held(functions), max_calls)]) + "\n"


def strict_grammar(dialect: Dialect, functions: Sequence[Mapping[str, Any]], max_calls: int | None) -> str:
    """Grammar of a whole answer, thought included: any text, behind which there may be calls of these functions."""
    rules = [
        # A block may open within the thought. Think markers are no characters to a grammar but tokens of their own.
        "start: (anything marker)* (anything | opening block)",
        f"marker: {THINK} | {END_THINK}",
        "anything: /(?s:.*)/",
        f"opening[suffix={_quote('<' + DSML)}]: /(?s:.*)/",
        *_block(dialect, _held(functions), max_calls),
    ]
    return "\n".join(rules) + "\n"


def _held(functions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Functions that are `strict` keep to their schemas, others may get whatever parameters."""
    return [function if function.get("strict") else {"name": function["name"]} for function in functions]


def check_strict(function: Mapping[str, Any], what: str, param: str) -> None:
    """Raises ChatError if a call of this function cannot be held to all that its schema says."""
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if unknown := sorted(schema.keys() - _OF_STRICT):
        raise ChatError(f"{what}: a strict function's parameters cannot have {unknown[0]!r} at the top", param)
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise ChatError(f"{what}: a strict function's parameters must be an object with properties", param)
    if schema.get("additionalProperties"):
        raise ChatError(f"{what}: a strict function's additionalProperties must be false", param)
    if not isinstance(required, list) or any(not isinstance(name, str) or name not in properties for name in required):
        raise ChatError(f"{what}: required names what properties do not have", param)
    for name in properties:
        if not name or any(character in '"<>\n' for character in name):
            raise ChatError(f"{what}: the markup of calls has no way to write a parameter {name!r}", param)


def _block(dialect: Dialect, functions: Sequence[Mapping[str, Any]], max_calls: int | None) -> list[str]:
    """The rule `block`, what follows the first marker of a block of calls, and the rules that it needs."""
    writer = _Writer(dialect)
    names = [writer.call(number, function) for number, function in enumerate(functions)]
    repeated = "call" if max_calls == 1 else "call+"
    closing = f"</{DSML}{dialect.calls}>"
    return [
        f"block: {_quote(dialect.calls + '>' + _LINE)} {repeated} {_quote(closing)}",
        f"call: {' | '.join(names)}",
        # Ends with the first closing tag, which no text can hold.
        f"text[suffix={_quote(writer.end)}]: /(?s:.*)/",
        *writer.rules,
    ]


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
        if not properties and schema.get("additionalProperties", not function.get("strict")):
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
    said = {"type", "default", "examples", *_SAYS}
    return isinstance(schema, dict) and schema.get("type") == "string" and not (schema.keys() - said)


def _words_of(schema: Any) -> list[str]:
    """The texts that a schema of texts allows, if it lists them."""
    words = schema.get("enum") if isinstance(schema, dict) and schema.get("type") == "string" else None
    is_usable = isinstance(words, list) and all(isinstance(word, str) and word for word in words)
    return list(words) if words and is_usable else []


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
