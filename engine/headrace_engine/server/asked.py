"""What every API's request comes down to: a chat or a completion, and how its answer is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_engine.core import RequestError, TokenScore
from headrace_engine.server.answers import Choice
from headrace_engine.server.generation import Delta, Usage
from headrace_engine.server.schema import ChatBody, CompletionBody
from headrace_engine.server.tokenize import Tokenizer


class AnswerFormat(Protocol):
    """Writes one request's answer in the form of the API that it came by."""

    def first_chunk(self, index: int, prompt_token_ids: list[int], prompt_scores: list[TokenScore]) -> bytes:
        """What comes before the first text of a choice; may be empty."""

    def chunk(self, index: int, delta: Delta, usage: Usage) -> bytes:
        """Events with what a delta adds; empty if it shows nothing."""

    def last_chunks(self, usages: list[Usage]) -> bytes:
        """What ends a stream that went well."""

    def body(self, choices: list[Choice], usages: list[Usage]) -> bytes:
        """The whole answer."""

    def error_object(self, error: RequestError) -> dict[str, Any]:
        """The body that says what went wrong, instead of an answer."""

    def error_event(self, error: RequestError) -> bytes:
        """How a stream that has begun says that it cannot go on."""


@dataclass(frozen=True)
class Asked:
    """make_format: of the request's id, the model's name and its tokenizer."""

    body: ChatBody | CompletionBody
    make_format: Callable[[str, str, Tokenizer], AnswerFormat]
