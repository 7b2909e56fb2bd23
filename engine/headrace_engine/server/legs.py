"""What an engine does for each leg of a request (docs/architecture.md, "HTTP between router and engines")."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from headrace_engine.core import Leg, Ticket
from headrace_engine.kv.ticket import ticket_to_json
from headrace_engine.messages import Failed, Pushed, TicketReady
from headrace_engine.server.answers import Choice, ChoiceBuilder, event
from headrace_engine.server.asked import AnswerFormat
from headrace_engine.server.errors import ApiError
from headrace_engine.server.frontend import Frontend
from headrace_engine.server.generation import Answer, Usage
from headrace_engine.server.handle import Item
from headrace_engine.server.job import Job
from headrace_engine.server.metrics import Metrics, RequestTimer
from headrace_engine.server.tokenize import Tokenizer

_EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EventStream:
    """A response of events, begun with its first write, so that what fails before that is a plain response."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self.has_answer = False  # the client's own bytes have begun

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    async def write(self, data: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers=_EVENT_STREAM)
            await self._response.prepare(self._request)
        await self._response.write(data)

    async def write_answer(self, data: bytes) -> None:
        self.has_answer = True
        await self.write(data)

    async def finish(self) -> web.StreamResponse:
        assert self._response is not None
        await self._response.write_eof()
        return self._response


class Legs:
    """Serves checked jobs over a frontend."""

    def __init__(self, frontend: Frontend, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._frontend = frontend
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def whole(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Prompt and generation on this engine."""
        async with self._answers(job, Leg.WHOLE) as answers:
            if not job.is_stream:
                body = await self._collect(job, answers, [[]] * len(answers))
                return web.Response(body=body, content_type="application/json")
            stream = EventStream(request)
            try:
                await self._stream(job, answers, stream, [[]] * len(answers))
            except ApiError as error:
                if not stream.has_answer:
                    raise
                self._metrics.failed(error.error.status)
                await stream.write(job.format.error_event(error.error))
            return await stream.finish()

    async def decode(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Reserve, hand out the tickets, wait for the KV, generate."""
        async with self._answers(job, Leg.DECODE) as answers:
            stream = EventStream(request)
            begun: list[Sequence[Item]] = [[]] * len(answers)
            try:
                if job.scores_prompt:
                    await stream.write(event("ticket", b"null"))  # no KV is wanted
                else:
                    await self._hand_out_tickets(job, answers, begun, stream)
                if job.is_stream:
                    await self._stream(job, answers, stream, begun)
                else:
                    body = await self._collect(job, answers, begun)
                    await stream.write(event("response", b'{"status":200,"body":' + body + b"}"))
            except ApiError as error:
                if not stream.has_begun:
                    raise
                self._metrics.failed(error.error.status)
                await stream.write(_failure(error, stream.has_answer, job.format))
            return await stream.finish()

    async def _hand_out_tickets(
        self, job: Job, answers: list[Answer], begun: list[Sequence[Item]], stream: EventStream
    ) -> None:
        """One for each prompt, as its rank has room. `begun` gets what came with them. Raises ApiError.

        Of several prompts all have their KV when this returns: a client's bytes begin with nothing left that prefill
        could fail at, so that the request may be tried again elsewhere until then.
        """
        writing = asyncio.Lock()

        async def hand_out(index: int) -> None:
            choices = range(index * job.num_choices, (index + 1) * job.num_choices)
            answer = answers[choices[0]]
            ticket, items = await self._ticket(answer)
            ticket = msgspec.structs.replace(ticket, prompt_index=index, num_prompts=job.num_prompts)
            async with writing:
                await stream.write(event("ticket", ticket_to_json(ticket)))
            ticket_at = self._metrics.ticket(job.arrived_at)
            for choice in choices:
                answers[choice].ticket_at = ticket_at
            if job.num_prompts > 1 and not items:
                items = await answer.handle.next()
            if items and isinstance(items[0], Failed):
                answer.take(items)  # raises its error
            begun[choices[0]] = items

        await _all([hand_out(index) for index in range(job.num_prompts)])

    @staticmethod
    async def _ticket(answer: Answer) -> tuple[Ticket, list[Item]]:
        """The one for all answers of a prompt, and what came with it. Raises ApiError."""
        first, *rest = await answer.handle.next()
        if isinstance(first, Failed):
            answer.take([first])  # raises its error
        assert isinstance(first, TicketReady), f"a decode leg began with {first!r}"
        return first.ticket, rest

    async def prefill(self, job: Job) -> web.StreamResponse:
        """Compute the prompt and push its KV to where the ticket says."""
        handle = self._frontend.submit(job.label, Leg.PREFILL, job.prompts[0], job.samplings[0], job.ticket)
        try:
            while True:
                for item in await handle.next():
                    if isinstance(item, Failed):
                        raise ApiError(item.error)
                    if isinstance(item, Pushed):
                        body = msgspec.json.encode({"status": "pushed", "num_cached_tokens": item.num_cached_tokens})
                        return web.Response(body=body, content_type="application/json")
        finally:
            handle.close()

    @asynccontextmanager
    async def _answers(self, job: Job, leg: Leg) -> AsyncIterator[list[Answer]]:
        """Every choice of the job, placed. All are closed on the way out, which aborts what is not done."""
        answers: list[Answer] = []
        try:
            for prompt, sampling in zip(job.prompts, job.samplings, strict=True):
                # One ticket for all choices of a prompt: its KV is awaited once.
                number = len(answers) % job.num_choices
                first = answers[-number].handle if leg is Leg.DECODE and number else None
                handle = self._frontend.submit(job.label, leg, prompt, sampling, shares_kv_of=first)
                parser = job.chat.parser() if job.chat is not None else None
                answers.append(Answer(handle, self._tokenizer, job.stops, Usage(len(prompt)), sampling, parser))
            yield answers
        finally:
            for answer in answers:
                if answer.is_awaited:
                    self._metrics.aborted(answer.handle.rank)
                answer.handle.close()

    async def _collect(self, job: Job, answers: list[Answer], begun: Sequence[Sequence[Item]]) -> bytes:
        """The whole answer's body. Raises ApiError."""
        choices = await _all(
            [
                self._choice(job, answer, prompt, items)
                for answer, prompt, items in zip(answers, job.prompts, begun, strict=True)
            ]
        )
        return job.format.body(choices, [answer.usage for answer in answers])

    async def _choice(self, job: Job, answer: Answer, prompt: list[int], begun: Sequence[Item]) -> Choice:
        timer = self._metrics.request(answer.handle.rank, job.arrived_at, answer.ticket_at)
        builder = ChoiceBuilder(prompt)
        async for delta in answer.deltas(begun):
            timer.tokens(len(delta.token_ids))
            builder.add(delta)
            if delta.finish_reason is not None:
                timer.finished(delta.finish_reason.value, answer.usage)
                return builder.finish(delta)
        raise AssertionError("an answer ended without a reason")

    async def _stream(
        self, job: Job, answers: list[Answer], stream: EventStream, begun: Sequence[Sequence[Item]]
    ) -> None:
        """The answer's events. Raises ApiError."""
        if len(answers) == 1:
            await self._stream_choice(job, 0, answers[0], stream, begun[0])
        else:
            await _all(
                [
                    self._stream_choice(job, index, answer, stream, items)
                    for index, (answer, items) in enumerate(zip(answers, begun, strict=True))
                ]
            )
        await stream.write_answer(job.format.last_chunks([answer.usage for answer in answers]))

    async def _stream_choice(
        self, job: Job, index: int, answer: Answer, stream: EventStream, begun: Sequence[Item]
    ) -> None:
        timer: RequestTimer = self._metrics.request(answer.handle.rank, job.arrived_at, answer.ticket_at)
        is_first = True
        async for delta in answer.deltas(begun):
            timer.tokens(len(delta.token_ids))
            head = job.format.first_chunk(index, job.prompts[index], delta.prompt_scores) if is_first else b""
            is_first = False
            if data := head + job.format.chunk(index, delta, answer.usage):
                await stream.write_answer(data)
            if delta.finish_reason is not None:
                timer.finished(delta.finish_reason.value, answer.usage)


async def _all(coroutines: list) -> list:  # type: ignore[type-arg]
    """Results in order; the first exception cancels the others and is raised as itself."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]


def _failure(error: ApiError, has_answer: bool, answer_format: AnswerFormat) -> bytes:
    if has_answer:
        return answer_format.error_event(error.error)
    body = answer_format.error_object(error.error)
    outcome = {"status": error.error.status, "retriable": error.error.retriable, "body": body}
    return event("error", msgspec.json.encode(outcome))
