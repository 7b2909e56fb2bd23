"""The client that users bring, unmodified, through the router."""

from __future__ import annotations

import openai
import pytest
from tests.router.fakes import rig


def client(r, **kwargs) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=r.base + "/v1", api_key="k", **kwargs)


async def test_completion_and_chat_whole_and_streamed():
    async with rig() as r, client(r) as c:
        whole = await c.completions.create(model="tiny", prompt="x")
        assert whole.choices[0].text == "abc"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 3
        messages = [{"role": "user", "content": "x"}]
        chat = await c.chat.completions.create(model="tiny", messages=messages)
        assert chat.choices[0].message.content == "abc"
        stream = await c.completions.create(model="tiny", prompt="x", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a", "b", "c"]
        chat_stream = await c.chat.completions.create(model="tiny", messages=messages, stream=True)
        assert [chunk.choices[0].delta.content async for chunk in chat_stream] == ["a", "b", "c"]
        assert [model.id async for model in c.models.list()] == ["tiny"]
        assert await r.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_errors_are_the_clients_own_exceptions(stream):
    async with rig() as r, client(r, max_retries=0) as c:
        r.decode[0].always = "400"
        with pytest.raises(openai.BadRequestError, match="fault 400"):
            await c.completions.create(model="tiny", prompt="x", stream=stream)
        r.decode[0].always = "429"
        with pytest.raises(openai.RateLimitError):
            await c.completions.create(model="tiny", prompt="x", stream=stream)
        r.decode[0].always = "503"
        with pytest.raises(openai.InternalServerError):
            await c.completions.create(model="tiny", prompt="x", stream=stream)


async def test_a_stream_that_breaks_raises_after_the_tokens_it_had():
    async with rig() as r, client(r, max_retries=0) as c:
        r.decode[0].always = "die_mid_event"
        texts = []
        stream = await c.completions.create(model="tiny", prompt="x", stream=True)

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError, match="was lost before its end"):
            await read()
        assert texts == ["a", "b"]


async def test_a_client_that_stops_reading_early_closes_both_legs():
    async with rig() as r, client(r) as c:
        r.decode[0].tokens, r.decode[0].token_seconds = ["t"] * 1000, 0.02
        stream = await c.completions.create(model="tiny", prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()
        assert await r.settled()
