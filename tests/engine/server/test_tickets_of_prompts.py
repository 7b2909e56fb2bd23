"""Several prompts in one request with prefill and decode apart: a ticket for each, and nothing for the client before
the KV of all is there."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.kv.tickets import make_ticket

from headrace_engine.core import RequestError, SamplingParams
from headrace_engine.messages import Failed, TicketReady, Tokens
from headrace_engine.server.answers import Format
from headrace_engine.server.errors import ApiError
from headrace_engine.server.generation import Answer, Usage
from headrace_engine.server.handle import Item, RequestHandle
from headrace_engine.server.job import Job, _given
from headrace_engine.server.legs import Legs
from headrace_engine.server.schema import decode_completion
from headrace_engine.server.tokenize import Tokenizer

NUM_CHOICES = 2
LOST = RequestError(503, "the KV did not come", "service_unavailable", "kv_transfer_failed", retriable=True)


class HandingOut:
    """A request for two prompts with two choices each, whose tickets are being handed out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        sampling = SamplingParams(3)
        self.handles = [RequestHandle(str(number), 0, lambda _: None) for number in range(2 * NUM_CHOICES)]
        self.answers = [Answer(handle, tokenizer, (), Usage(1), sampling) for handle in self.handles]
        self.begun: list[Any] = [[]] * len(self.handles)
        self.tickets: list[dict[str, Any]] = []
        answer_format = Format("r", "m", tokenizer, is_chat=False)
        job = Job("r", [[1]] * 4, [sampling] * 4, NUM_CHOICES, (), True, answer_format, None, 0.0)
        metrics: Any = SimpleNamespace(ticket=lambda _: 5.0)
        legs = Legs(None, tokenizer, metrics)  # type: ignore[arg-type]
        self.task = asyncio.create_task(legs._hand_out_tickets(job, self.answers, self.begun, self))  # type: ignore[arg-type]

    async def write(self, data: bytes) -> None:
        name, line = data.decode().strip().split("\n")
        assert name == "event: ticket"
        self.tickets.append(json.loads(line.removeprefix("data: ")))

    async def say(self, choice: int, item: Item) -> None:
        """What the rank says of a choice, and time for what it leads to."""
        self.handles[choice].deliver(item)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_tickets_go_out_as_they_come_and_the_answer_waits_for_the_kv_of_all(tokenizer: Tokenizer) -> None:
    request = HandingOut(tokenizer)
    await request.say(2, TicketReady("2", make_ticket(generation=1)))
    await request.say(2, Tokens("2", [7]))
    await request.say(0, TicketReady("0", make_ticket(generation=2)))
    assert [(t["prompt_index"], t["num_prompts"], t["generation"]) for t in request.tickets] == [(1, 2, 1), (0, 2, 2)]
    assert not request.task.done()
    await request.say(0, Tokens("0", [8]))
    await request.task
    assert [[item.token_ids for item in items] for items in request.begun] == [[[8]], [], [[7]], []]
    assert [answer.ticket_at for answer in request.answers] == [5.0] * 4


@pytest.mark.parametrize("is_last_word", [False, True], ids=["behind its ticket", "in place of it"])
async def test_a_prompt_that_fails_fails_the_request_before_any_answer(
    tokenizer: Tokenizer, is_last_word: bool
) -> None:
    request = HandingOut(tokenizer)
    await request.say(0, TicketReady("0", make_ticket()))
    await request.say(0, Tokens("0", [8]))
    if not is_last_word:
        await request.say(2, TicketReady("2", make_ticket(generation=2)))
    await request.say(2, Failed("2", LOST))
    with pytest.raises(ApiError) as raised:
        await request.task
    assert raised.value.error == LOST


PROMPTS: list[tuple[Any, int, Any]] = [
    ("ab", 0, "ab"),
    ([5, 6], 0, [5, 6]),
    (["ab", "cd"], 1, "cd"),
    ([[5], [6, 7], [8]], 2, [8]),
]


@pytest.mark.parametrize(("prompt", "index", "expected"), PROMPTS)
def test_a_prefill_leg_computes_the_prompt_of_its_ticket(prompt: Any, index: int, expected: Any) -> None:
    body = decode_completion(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert _given(body, make_ticket(prompt_index=index)) == [expected]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_ticket_for_a_prompt_that_is_not_there_is_refused(index: int) -> None:
    body = decode_completion(b'{"model": "m", "prompt": ["ab", "cd"]}')
    with pytest.raises(ApiError, match=f"prompt {index} of 2"):
        _given(body, make_ticket(prompt_index=index))
