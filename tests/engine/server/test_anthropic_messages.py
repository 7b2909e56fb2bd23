"""`/v1/messages` as Anthropic's own client sees it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from tests.engine.server.conftest import Harness
from tests.engine.server.test_chat import ANSWER, ARGUMENTS, REASONING, SCRIPTS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("get_weather", "clock")]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
HELLO: list[Any] = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
def scripts() -> list[str]:
    return SCRIPTS


@pytest.fixture
def client(anthropic_client: AsyncAnthropic) -> AsyncAnthropic:
    return anthropic_client


async def ask(client: AsyncAnthropic, messages: list[Any] = HELLO, **fields: Any) -> Any:
    return await client.messages.create(**{"model": "toy", "messages": messages, "max_tokens": 1000, **fields})


def check_calls(message: Any) -> list[Any]:
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == REASONING
    assert message.content[1].text.strip() == "I look."
    assert [block.input for block in message.content[2:]] == ARGUMENTS
    assert message.stop_reason == "tool_use"
    return list(message.content[2:])


async def test_an_answer_with_a_thought_and_calls_and_the_turn_after_it(client: AsyncAnthropic) -> None:
    first = await ask(client, system="Be brief.", tools=TOOLS, thinking=THINKING)
    calls = check_calls(first)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "fine"} for call in calls]
    history = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await ask(client, history, system=[{"type": "text", "text": "Be brief."}], tools=TOOLS, thinking=THINKING)
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert second.content[-1].text == ANSWER
    assert (second.stop_reason, second.role) == ("end_turn", "assistant")
    assert second.usage.output_tokens > 0


async def test_a_stream_says_the_same_in_events(client: AsyncAnthropic) -> None:
    async with client.messages.stream(
        model="toy", messages=HELLO, max_tokens=1000, tools=TOOLS, thinking=THINKING
    ) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    check_calls(message)
    assert message.usage.output_tokens > 0


@pytest.mark.parametrize("scripts", [["one two three"]])
async def test_why_an_answer_ended(client: AsyncAnthropic) -> None:
    short = await ask(client, max_tokens=3)
    assert (short.content[0].text, short.stop_reason) == ("one", "max_tokens")
    stopped = await ask(client, stop_sequences=["never", " three"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "one two",
        "stop_sequence",
        " three",
    )
    async with client.messages.stream(model="toy", messages=HELLO, max_tokens=100, stop_sequences=[" two"]) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.content[0].text, streamed.stop_reason, streamed.stop_sequence) == ("one", "stop_sequence", " two")


@pytest.mark.parametrize("scripts", [["no end of thinking " * 20]])
async def test_a_thought_ends_where_the_request_says(client: AsyncAnthropic) -> None:
    answer = await ask(client, thinking={"type": "enabled", "budget_tokens": 6}, max_tokens=20)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "no end"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "clock"}])
async def test_a_call_that_is_insisted_on(client: AsyncAnthropic, choice: Any) -> None:
    tools = [{"name": "clock", "input_schema": {"type": "object", "properties": {}}}]
    answer = await ask(client, tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True}, max_tokens=200)
    assert next(block.name for block in answer.content if block.type == "tool_use") == "clock"


async def test_tokens_are_counted_as_they_will_be_used(client: AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model="toy", messages=HELLO, system="Be brief.", tools=TOOLS)
    answer = await ask(client, system="Be brief.", tools=TOOLS, max_tokens=1)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("scripts", [["yes"]])
async def test_structured_output(client: AsyncAnthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_flexible": False}
    answer = await ask(client, extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert json.loads(answer.content[0].text) == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "neither user nor assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "nothing to answer"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"extra_body": {"container": "c"}}, "container"),
    ],
)
async def test_refusals_are_the_clients_own_exceptions(client: AsyncAnthropic, fields: Any, said: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said) as refused:
        await ask(client, **fields)
    assert refused.value.body["type"] == "error"  # type: ignore[index]


async def test_an_unknown_model_and_a_draining_engine(engine: Harness, client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await ask(client, model="other")
    engine.frontend.is_draining = True
    with pytest.raises(anthropic.APIStatusError) as refused:
        await ask(client)
    assert refused.value.status_code == 503


@pytest.mark.parametrize(("scripts", "step_seconds", "timeout_seconds"), [(["x" * 200], 0.02, 0.5)])
async def test_an_error_in_the_middle_of_a_stream_is_raised(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="not done within"):
        async with client.messages.stream(model="toy", messages=HELLO, max_tokens=500) as stream:
            [_ async for _ in stream]
