"""The unmodified clients of OpenAI and Anthropic, through a real router, to real prefill and decode engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tests.pd.engines import MODEL, TIMEOUT, Engine, running
from tests.router.fakes import wait_until

from headrace_engine.core import Role
from headrace_engine.router.app import Router
from headrace_engine.router.config import Limits
from headrace_engine.router.group import Endpoint
from headrace_engine.router.static import StaticSource

pytestmark = pytest.mark.slow
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "degrees": {"type": "boolean"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a model of random weights would write blanks for ever
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    engines = Engine("--role", "prefill"), Engine("--role", "decode")
    with running(*engines):
        yield engines


@pytest.fixture
async def url(pair: tuple[Engine, Engine]) -> AsyncIterator[str]:
    router = Router(MODEL, Limits())
    endpoints = [
        Endpoint(role, engine.url, engine.url, ready=False)
        for role, engine in zip((Role.PREFILL, Role.DECODE), pair, strict=True)
    ]
    try:
        port = await router.start("127.0.0.1", 0, StaticSource(endpoints, router.engines, router.fleet))
        await wait_until(lambda: not router.fleet.missing(), 20)
        yield f"http://127.0.0.1:{port}"
    finally:
        await router.stop()
    for engine in pair:
        engine.wait_all_free()


@pytest.fixture
async def openai_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def anthropic_client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_a_chat_with_structured_output_and_scores(openai_client: AsyncOpenAI) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = await openai_client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format=response_format, logprobs=True, top_logprobs=2, max_tokens=60
    )
    choice = answer.choices[0]
    assert set(json.loads(choice.message.content or "")) == {"city", "degrees"}
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content or []) == answer.usage.completion_tokens


async def test_several_answers_streamed_and_a_prompt_with_scores(openai_client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 5, "temperature": 1.0}
    whole = await openai_client.chat.completions.create(**fields, messages=HELLO, n=3)
    texts = ["", "", ""]
    async for chunk in await openai_client.chat.completions.create(**fields, messages=HELLO, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    scored = await openai_client.completions.create(**fields, prompt="Hello", echo=True, logprobs=1)
    (choice,) = scored.choices
    assert choice.text.startswith("Hello")
    assert choice.logprobs is not None
    assert [value is None for value in choice.logprobs.token_logprobs or []] == [True] + [False] * (4 + 6)


async def test_several_prompts_whole_and_streamed_and_more_than_run_at_once(openai_client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 5, "temperature": 1.0, "n": 2}
    prompts = ["Hello", "To be", "Where does the water go?"]
    whole = await openai_client.completions.create(**fields, prompt=prompts)
    texts = [""] * 6
    async for chunk in await openai_client.completions.create(**fields, prompt=prompts, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    alone = await openai_client.completions.create(**fields, prompt=prompts[1])
    assert texts[2:4] == [choice.text for choice in alone.choices]
    many = await openai_client.completions.create(model=MODEL, max_tokens=3, prompt=[f"{i} and" for i in range(100)])
    assert [choice.index for choice in many.choices] == list(range(100))


async def test_a_client_that_leaves_ends_the_answers_to_all_its_prompts(openai_client: AsyncOpenAI) -> None:
    """The fixture's end finds nothing left on either engine."""
    prompts = [f"{i} and" for i in range(5)]
    stream = await openai_client.completions.create(model=MODEL, prompt=prompts, max_tokens=3000, stream=True)
    async for _ in stream:
        break
    await stream.close()


async def test_responses_whole_and_streamed(openai_client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    whole = await openai_client.responses.create(**fields)
    assert (whole.status, whole.usage.output_tokens if whole.usage else 0) == ("incomplete", 8)
    text, last = "", None
    async for event in await openai_client.responses.create(**fields, stream=True):
        last = event
        if event.type == "response.output_text.delta":
            text += event.delta
    assert last is not None
    assert last.type == "response.incomplete"
    assert text == whole.output_text


async def test_messages_whole_streamed_and_counted(anthropic_client: AsyncAnthropic) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = await anthropic_client.messages.create(**fields)
    async with anthropic_client.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]  # type: ignore[union-attr]
    assert (whole.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
    counted = await anthropic_client.messages.count_tokens(model=MODEL, messages=HELLO)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def test_tokens_of_a_text_and_the_requests_own_id(url: str) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        made = await client.post(f"{url}/tokenize", json={"prompt": "ab"}, headers={"X-Request-Id": "mine"})
        back = await client.post(f"{url}/detokenize", json={"tokens": made.json()["tokens"]})
    assert made.headers["X-Request-Id"] == "mine"
    assert back.json() == {"prompt": "ab"}
