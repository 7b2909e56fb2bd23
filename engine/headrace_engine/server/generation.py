"""From a rank's tokens to a client's text: detokenizing, stop strings, the reason for the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from headrace_engine.core import FinishReason
from headrace_engine.messages import Failed, Tokens
from headrace_engine.server.errors import ApiError
from headrace_engine.server.handle import Item, RequestHandle
from headrace_engine.server.tokenize import Detokenizer, StopMatcher, Tokenizer


@dataclass(slots=True)
class Delta:
    """What one step (or several that came together) adds to an answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Usage:
    num_prompt_tokens: int
    num_generated: int = 0
    num_cached_tokens: int = 0


@dataclass
class Answer:
    """One choice in the making."""

    handle: RequestHandle
    tokenizer: Tokenizer
    stops: Sequence[str]
    usage: Usage
    min_tokens: int = 0  # stop strings count only in what comes after so many
    is_awaited: bool = True  # neither its last delta nor its error has come
    _detokenizer: Detokenizer = field(init=False)
    _matcher: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)
        self._matcher = StopMatcher(self.stops)

    async def deltas(self, begun: Sequence[Item] = ()) -> AsyncIterator[Delta]:
        """The answer as it is made; the last delta has the finish reason. Raises ApiError if the request fails.

        begun: items that were taken from the handle already.
        """
        items = begun or await self.handle.next()
        while True:
            delta = self.take(items)
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                yield delta
            if delta.finish_reason is not None:
                return
            items = await self.handle.next()

    def take(self, items: Sequence[Item]) -> Delta:
        """What these items add. Raises ApiError if the request has failed."""
        delta = Delta("", [])
        pieces: list[str] = []
        for item in items:
            if isinstance(item, Failed):
                self.is_awaited = False
                raise ApiError(item.error)
            if not isinstance(item, Tokens):
                continue  # a ticket, which the leg has dealt with
            self.usage.num_cached_tokens = item.num_cached_tokens
            self._take_tokens(item, delta, pieces)
            if delta.finish_reason is not None:
                break
        delta.text = "".join(pieces)
        self.is_awaited = delta.finish_reason is None
        return delta

    def _take_tokens(self, item: Tokens, delta: Delta, pieces: list[str]) -> None:
        for position, token_id in enumerate(item.token_ids):
            delta.token_ids.append(token_id)
            self.usage.num_generated += 1
            is_eos = item.finish_reason is FinishReason.STOP and position == len(item.token_ids) - 1
            if not is_eos:  # a token that ends an answer has no text, whatever it decodes to
                text = self._detokenizer.add(token_id)
                pieces.append(self._matcher.add(text) if self.usage.num_generated > self.min_tokens else text)
            if self._matcher.is_stopped:
                delta.finish_reason = FinishReason.STOP
                return
        if item.finish_reason is not None:
            pieces.append(self._matcher.add(self._detokenizer.finish()))
            is_stopped = self._matcher.is_stopped
            pieces.append(self._matcher.finish())
            delta.finish_reason = FinishReason.STOP if is_stopped else item.finish_reason
