"""From a rank's tokens to a client's text: detokenizing, stop strings, reasoning and calls, the reason for the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from headrace_engine.chat.parse import AnswerParser, CallPiece, Parsed
from headrace_engine.core import FinishReason, SamplingParams, TokenScore
from headrace_engine.messages import Failed, Tokens
from headrace_engine.server.errors import ApiError
from headrace_engine.server.handle import Item, RequestHandle
from headrace_engine.server.tokenize import Detokenizer, StopMatcher, Tokenizer


@dataclass(slots=True)
class Delta:
    """What one step (or several that came together) adds to an answer.

    has_calls: with the finish reason: the answer ends in tool calls that are whole. scores: of each token, if asked
    for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    has_calls: bool = False
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    stop: str | None = None  # the stop string that ended the answer

    @property
    def reason(self) -> str:
        """The finish reason as OpenAI names it."""
        assert self.finish_reason is not None
        return "tool_calls" if self.has_calls else self.finish_reason.value

    @property
    def is_visible(self) -> bool:
        """Whether it shows a client anything but token ids."""
        return bool(self.text or self.reasoning or self.calls or self.scores or self.finish_reason is not None)


@dataclass(slots=True)
class Usage:
    num_prompt_tokens: int
    num_generated: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int | None = None  # None: answers of this kind have no reasoning


@dataclass
class Answer:
    """One choice in the making."""

    handle: RequestHandle
    tokenizer: Tokenizer
    stops: Sequence[str]
    usage: Usage
    sampling: SamplingParams
    parser: AnswerParser | None = None  # None: all text is the answer
    ticket_at: float | None = None  # DECODE leg: when its ticket came, on `time.perf_counter`'s clock
    is_awaited: bool = True  # neither its last delta nor its error has come
    _detokenizer: Detokenizer = field(init=False)
    _matcher: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)
        self._matcher = StopMatcher(self.stops)
        if self.parser is not None:
            self.usage.num_reasoning_tokens = 0

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
        for item in items:
            if isinstance(item, Failed):
                self.is_awaited = False
                raise ApiError(item.error)
            if not isinstance(item, Tokens):
                continue  # a ticket, which the leg has dealt with
            self.usage.num_cached_tokens = item.num_cached_tokens
            delta.scores += item.scores
            delta.prompt_scores += item.prompt_scores
            self._take_tokens(item, delta)
            if delta.finish_reason is not None:
                break
        self.is_awaited = delta.finish_reason is None
        return delta

    def _take_tokens(self, item: Tokens, delta: Delta) -> None:
        for position, token_id in enumerate(item.token_ids):
            delta.token_ids.append(token_id)
            self.usage.num_generated += 1
            is_eos = item.finish_reason is FinishReason.STOP and position == len(item.token_ids) - 1
            if not is_eos:  # a token that ends an answer has no text, whatever it decodes to
                text = self._detokenizer.add(token_id)
                # Stop strings count only in what comes behind the first min_tokens.
                is_matched = self.usage.num_generated > self.sampling.min_tokens
                self._show(self._matcher.add(text) if is_matched else text, delta)
                if self.parser is not None and self.parser.is_reasoning:
                    self.usage.num_reasoning_tokens = (self.usage.num_reasoning_tokens or 0) + 1
            if self._matcher.is_stopped:
                self._finish(FinishReason.STOP, delta)
                return
        if item.finish_reason is not None:
            self._show(self._matcher.add(self._detokenizer.finish()), delta)
            is_stopped = self._matcher.is_stopped
            self._show(self._matcher.finish(), delta)
            self._finish(FinishReason.STOP if is_stopped else item.finish_reason, delta)

    def _show(self, text: str, delta: Delta) -> None:
        if self.parser is None:
            delta.text += text
        elif text:
            _add(self.parser.feed(text), delta)

    def _finish(self, reason: FinishReason, delta: Delta) -> None:
        delta.finish_reason = reason
        delta.stop = self._matcher.stop
        if self.parser is not None:
            is_cut = self._matcher.is_stopped or any(t in self.sampling.stop_token_ids for t in delta.token_ids[-1:])
            is_complete = reason is FinishReason.STOP and not is_cut
            _add(self.parser.finish(is_complete=is_complete), delta)
            delta.has_calls = reason is FinishReason.STOP and self.parser.has_whole_calls


def _add(parsed: Parsed, delta: Delta) -> None:
    delta.text += parsed.content
    delta.reasoning += parsed.reasoning
    delta.calls += parsed.calls
