"""`response_format` and `structured_outputs`: from a body to a grammar that is known to compile."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace_engine.core import RequestError
from headrace_engine.sampling import grammar
from headrace_engine.sampling.grammar import GrammarCompiler, GrammarError
from headrace_engine.server.errors import ApiError, bad_request
from headrace_engine.server.schema import CommonBody

MAX_GRAMMAR_BYTES = 256 << 10
MAX_CHOICES = 1024
MAX_WAITING = 64  # grammars that may queue for the thread
CHECK_SECONDS = 10.0
_NUM_REMEMBERED = 256  # grammars that have compiled; clients send the same ones again and again
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace")


class GrammarDoor:
    """Compiles each new grammar once before a request with it goes on, on a thread of its own."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._accepted: OrderedDict[str, None] = OrderedDict()
        self._num_waiting = 0

    async def grammar_of(self, body: CommonBody) -> str | None:
        """What the answer must follow, None if nothing. Raises ApiError."""
        made = _grammar_and_field(body)
        if made is None:
            return None
        return await self.accept(*made, body)

    async def accept(self, text: str, field: str, body: CommonBody) -> str:
        """The grammar, once it has compiled; `field` is where it is from. Raises ApiError."""
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise bad_request(f"{field} is larger than {MAX_GRAMMAR_BYTES >> 10} KiB", field, "invalid_value")
        if body.min_tokens or body.ignore_eos:
            name = "min_tokens" if body.min_tokens else "ignore_eos"
            raise bad_request(f"{name} and {field} exclude each other: the grammar says when an answer may end", name)
        if text in self._accepted:
            self._accepted.move_to_end(text)
        else:
            await self._check(text, field)
        return text

    async def _check(self, text: str, field: str) -> None:
        if self._num_waiting >= MAX_WAITING:
            message = f"{MAX_WAITING} grammars wait to be compiled already; retry later"
            raise ApiError(RequestError(503, message, "service_unavailable", "overloaded", retriable=True))
        self._num_waiting += 1
        try:
            compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compiler.compile, text)
            await asyncio.wait_for(compiling, CHECK_SECONDS)
        except GrammarError as error:
            raise bad_request(f"{field}: {error}", field, "invalid_value") from None
        except TimeoutError:
            message = f"{field} was not compiled within {CHECK_SECONDS:g} s"
            raise ApiError(
                RequestError(503, message, "service_unavailable", "overloaded", field, retriable=True)
            ) from None
        finally:
            self._num_waiting -= 1
        self._accepted[text] = None
        if len(self._accepted) > _NUM_REMEMBERED:
            self._accepted.popitem(last=False)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _grammar_and_field(body: CommonBody) -> tuple[str, str] | None:
    """The grammar's text and the field that it is from, None if the body has neither. Raises ApiError (400)."""
    wanted = body.structured_outputs or None
    schema = _schema_of_format(body.response_format)
    if schema is None and wanted is None:
        return None
    if schema is not None and wanted is not None:
        raise bad_request("response_format and structured_outputs exclude each other", "structured_outputs")
    if wanted is None:
        return _made("response_format", lambda: grammar.of_json_schema(schema)), "response_format"
    return _of_structured_outputs(wanted), "structured_outputs"


def _schema_of_format(response_format: dict[str, Any] | None) -> Any:
    """The JSON schema that a response_format stands for, None if it asks for text."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        message = f"response_format.type {kind!r} is none of text, json_object, json_schema"
        raise bad_request(message, "response_format", "unsupported_value")
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise bad_request("response_format.json_schema.schema must be a JSON schema", "response_format")
    return schema


def _of_structured_outputs(wanted: dict[str, Any]) -> str:
    field = "structured_outputs"
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    for name in given:
        if name not in _KINDS and name not in _OPTIONS:
            raise bad_request(f"{field}.{name} is not supported", field, "unsupported_value")
    kinds = [name for name in _KINDS if name in given]
    if len(kinds) != 1:
        raise bad_request(f"{field} needs exactly one of {', '.join(_KINDS)}", field)
    (kind,) = kinds
    value = given[kind]
    if kind in ("json", "json_object"):
        schema = value if kind == "json" else {"type": "object"}
        if not isinstance(schema, dict | str):
            raise bad_request(f"{field}.json must be a JSON schema", field)
        pattern, is_compact = given.get("whitespace_pattern"), bool(given.get("disable_any_whitespace"))
        return _made(
            field,
            lambda: grammar.of_json_schema(schema, whitespace_pattern=pattern, allows_whitespace=not is_compact),
        )
    if kind == "choice":
        is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
        if not is_list or not all(isinstance(choice, str) and choice for choice in value):
            raise bad_request(f"{field}.choice must be 1 to {MAX_CHOICES} strings, none empty", field)
        return grammar.of_choice(value)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{field}.{kind} must be a string that is not empty", field)
    if len(value) > MAX_GRAMMAR_BYTES:
        raise bad_request(f"{field}.{kind} is larger than {MAX_GRAMMAR_BYTES >> 10} KiB", field, "invalid_value")
    return _made(field, lambda: grammar.of_regex(value) if kind == "regex" else grammar.of_grammar(value))


def _made(field: str, make: Callable[[], str]) -> str:
    try:
        return make()
    except ValueError as error:
        raise bad_request(f"{field}: {error}", field, "invalid_value") from None
