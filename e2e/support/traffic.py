"""Traffic of OpenAI's own client, without its retries unless asked for, kept up while something happens.

Every answer's tokens are known beforehand, so that each request ends in exactly one of the outcomes below. Half of the
clients stream, and half of each keep their connection, as users' programs do.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx
import openai

CONNECT_SECONDS = 10.0
PAUSE_SECONDS = 0.02
MAX_ANSWERS = 20_000
MAX_SHOWN = 5  # of each outcome


class Outcome(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"  # an explicit error in place of an answer
    BROKEN = "broken"  # an explicit error after tokens, which are right as far as they go
    LOST = "lost"  # the connection ended without a word
    TRUNCATED = "truncated"  # the answer ended as if it were complete, and is not
    WRONG = "wrong"  # other tokens
    HUNG = "hung"


@dataclass(frozen=True)
class Patience:
    """How long a client waits for a byte of what it asked for, and how often it asks again before the first one."""

    silence_seconds: float = 60.0  # then the request hangs
    num_retries: int = 0

    @property
    def first_byte_seconds(self) -> float:
        return self.silence_seconds * (1 + self.num_retries)


PATIENT = Patience()


@dataclass(frozen=True)
class Question:
    prompt: tuple[int, ...]
    expected: tuple[int, ...]  # the greedy answer's token ids; all of them are asked for


@dataclass(frozen=True)
class Answer:
    outcome: Outcome
    detail: str
    asked_at: float  # seconds since the traffic began
    seconds: float
    is_stream: bool
    num_tokens: int = 0  # that have come

    def __str__(self) -> str:
        kind = "stream" if self.is_stream else "whole answer"
        return f"  {kind} asked at {self.asked_at:.1f} s: {self.outcome} after {self.seconds:.1f} s: {self.detail}"


@dataclass
class Report:
    answers: list[Answer] = field(default_factory=list)

    def count(self, *outcomes: Outcome) -> int:
        return sum(answer.outcome in outcomes for answer in self.answers)

    @property
    def longest_seconds(self) -> float:
        return max((answer.seconds for answer in self.answers), default=0.0)

    def __str__(self) -> str:
        """Counts, and the first few of each outcome that is not `right`, with when and why."""
        counts = Counter(answer.outcome.value for answer in self.answers)
        lines = [f"{len(self.answers)} answers, the longest took {self.longest_seconds:.1f} s: {dict(counts)}"]
        for outcome in Outcome:
            if outcome is not Outcome.RIGHT:
                lines += [str(answer) for answer in self.answers if answer.outcome is outcome][:MAX_SHOWN]
        return "\n".join(lines)


@contextmanager
def traffic(
    url: str, model: str, questions: Sequence[Question], num_clients: int = 8, patience: Patience = PATIENT
) -> Iterator[Report]:
    """Have clients ask without a pause while the block runs. The report is complete after the block."""
    report = Report()
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        work = _run(url, model, questions, num_clients, patience, stop, report)
        clients = pool.submit(asyncio.run, work)
        try:
            yield report
        finally:
            stop.set()
        clients.result(patience.first_byte_seconds + patience.silence_seconds)


async def _run(
    url: str,
    model: str,
    questions: Sequence[Question],
    num_clients: int,
    patience: Patience,
    stop: threading.Event,
    report: Report,
) -> None:
    began = time.monotonic()
    turns = itertools.count()
    timeout = httpx.Timeout(patience.silence_seconds, connect=CONNECT_SECONDS)

    async def client(number: int) -> None:
        keeps_connection = number % 4 < 2
        limits = httpx.Limits(max_keepalive_connections=1 if keeps_connection else 0)
        http = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=patience.num_retries, http_client=http
        ) as api:
            while not stop.is_set() and len(report.answers) < MAX_ANSWERS:
                question = questions[next(turns) % len(questions)]
                is_stream = number % 2 == 0
                asked_at = time.monotonic()
                tokens: list[int] = []
                outcome, detail = await _ask(api, model, question, is_stream, tokens, patience)
                seconds = time.monotonic() - asked_at
                report.answers.append(Answer(outcome, detail, asked_at - began, seconds, is_stream, len(tokens)))
                await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(*(client(number) for number in range(num_clients)))


async def _ask(
    api: openai.AsyncOpenAI,
    model: str,
    question: Question,
    is_stream: bool,
    tokens: list[int],
    patience: Patience,
) -> tuple[Outcome, str]:
    """How the request ended, and why; `tokens` are those that came."""
    try:
        async with asyncio.timeout(patience.first_byte_seconds) as limit:

            def heard() -> None:
                limit.reschedule(asyncio.get_running_loop().time() + patience.silence_seconds)

            is_complete = await _read(api, model, question, is_stream, tokens, heard)
    except (TimeoutError, openai.APITimeoutError, httpx.TimeoutException):
        return Outcome.HUNG, f"silence after {len(tokens)} tokens"
    except (openai.APIConnectionError, httpx.TransportError) as error:
        return Outcome.LOST, f"after {len(tokens)} tokens: {error!r} of {error.__cause__!r}"
    except openai.APIError as error:
        if tuple(tokens) != question.expected[: len(tokens)]:
            return Outcome.WRONG, f"then an error: {error}; {tokens}, not {question.expected}"
        return (Outcome.BROKEN if tokens else Outcome.REFUSED), str(error)
    if tuple(tokens) != question.expected[: len(tokens)] or len(tokens) > len(question.expected):
        return Outcome.WRONG, f"{tokens}, not {question.expected}"
    if not is_complete or len(tokens) < len(question.expected):
        return Outcome.TRUNCATED, f"{len(tokens)} of {len(question.expected)} tokens"
    return Outcome.RIGHT, ""


async def _read(
    api: openai.AsyncOpenAI,
    model: str,
    question: Question,
    is_stream: bool,
    tokens: list[int],
    heard: Callable[[], None],
) -> bool:
    """Collect the answer's tokens, calling `heard` at each chunk; whether it says why it ended. Raises what the client
    raises."""
    finish_reason = None
    answer: Any = await api.completions.create(
        model=model,
        prompt=list(question.prompt),
        max_tokens=len(question.expected),
        temperature=0,
        stream=is_stream,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    if not is_stream:
        tokens += answer.choices[0].token_ids
        return answer.choices[0].finish_reason is not None
    async for chunk in answer:
        heard()
        for choice in chunk.choices:
            tokens += getattr(choice, "token_ids", None) or ()  # the last chunk may have none
            finish_reason = choice.finish_reason or finish_reason
    return finish_reason is not None
