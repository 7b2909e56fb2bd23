"""The client library that users bring, unmodified, against the engine's own HTTP server."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI
from tests.engine.server.conftest import MAX_MODEL_LEN, Harness
from tests.engine.serving.toy import expected

PROMPT = [40, 41, 42]
HELLO = [{"role": "user", "content": "hello"}]


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["toy"]


async def test_a_completion(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="toy", prompt=PROMPT, max_tokens=5, temperature=0, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == expected(PROMPT, 5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_completion_says_the_same(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model="toy", prompt=PROMPT, max_tokens=9, temperature=0)
    stream = await client.completions.create(model="toy", prompt=PROMPT, max_tokens=9, temperature=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="toy", messages=HELLO, max_tokens=5, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_a_streamed_chat_with_usage(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="toy", messages=HELLO, max_completion_tokens=5, temperature=0)
    stream = await client.chat.completions.create(
        model="toy",
        messages=HELLO,
        max_completion_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_refusals_are_the_clients_own_exceptions(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="other", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="toy", prompt=[20] * MAX_MODEL_LEN)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as negative:
        await client.chat.completions.create(model="toy", messages=HELLO, max_tokens=-1)
    assert negative.value.param == "max_tokens"


@pytest.mark.parametrize(("step_seconds", "timeout_seconds"), [(0.05, 0.4)])
async def test_an_error_in_the_middle_of_a_stream_is_raised(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="toy", prompt=PROMPT, max_tokens=50, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert (await anext(stream)).choices[0].text
    with pytest.raises(openai.APIError, match="not done within"):
        [_ async for _ in stream]


async def test_a_draining_engine_is_a_503(engine: Harness, client: AsyncOpenAI) -> None:
    engine.frontend.is_draining = True
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="toy", prompt=PROMPT)
    assert (caught.value.status_code, caught.value.code) == (503, "draining")
