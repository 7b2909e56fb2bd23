"""Chats with reasoning and tools, as OpenAI's own client sees them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.engine.chat.conversations import CLOCK, WEATHER, user

from headrace_engine.chat.formats import V4Format
from headrace_engine.chat.prompt import EOS
from headrace_engine.server.chat import plan_chat
from headrace_engine.server.errors import ApiError
from headrace_engine.server.schema import decode_chat

REASONING, ANSWER = "Ask the tool, 天.", "Sunny <3"
CALLS = """I look.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">杭 "州"</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="clock">

</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
SCRIPTS = [f"{REASONING}</think>{CALLS}", f"So.</think>{ANSWER}"]
ARGUMENTS = [{"city": '杭 "州"', "days": 2}, {}]
TOOLS = [WEATHER, CLOCK]


@pytest.fixture
def scripts() -> list[str]:
    return SCRIPTS


async def ask(client: AsyncOpenAI, messages: list[Any], **fields: Any) -> Any:
    """Thinking with little effort, unless the fields say otherwise: tiny models do not think by themselves."""
    fields = {"reasoning_effort": "low"} | fields
    return await client.chat.completions.create(model="toy", messages=messages, temperature=0, **fields)


async def streamed(client: AsyncOpenAI, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], str]:
    """(the message put together as clients do, finish reason)"""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    reason = ""
    async for chunk in await ask(client, messages, stream=True, **fields):
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
        for call in choice.delta.tool_calls or []:
            if call.index == len(message["tool_calls"]):
                assert call.type == "function"
                message["tool_calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
            message["tool_calls"][call.index]["arguments"] += call.function.arguments
    return message, reason


async def test_a_session_of_thought_calls_and_results(client: AsyncOpenAI) -> None:
    messages: list[Any] = [user("Weather?")]
    fields = {"tools": TOOLS, "extra_body": {"return_token_ids": True}}
    first = await ask(client, messages, **fields)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_extra["reasoning_content"] == REASONING
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "clock"]
    assert [json.loads(call.function.arguments) for call in calls] == ARGUMENTS
    assert len({call.id for call in calls}) == 2
    assert first.usage.completion_tokens_details.reasoning_tokens == len(REASONING.encode())
    assert first.usage.prompt_tokens_details.cached_tokens == 0

    messages.append(choice.message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in reversed(calls)]
    second = await ask(client, messages, **fields)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == ANSWER
    # The prompt of the second turn begins with all of the first, the model's own words included.
    said = first.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
    assert second.model_extra["prompt_token_ids"][: len(said)] == said
    assert second.usage.prompt_tokens_details.cached_tokens > 0


async def test_a_stream_says_the_same_as_the_whole_answer(client: AsyncOpenAI) -> None:
    message, reason = await streamed(client, [user("Weather?")], tools=TOOLS)
    assert (message["reasoning_content"], message["content"], reason) == (REASONING, "I look.", "tool_calls")
    assert [call["name"] for call in message["tool_calls"]] == ["get_weather", "clock"]
    assert [json.loads(call["arguments"]) for call in message["tool_calls"]] == ARGUMENTS
    assert all(call["id"].startswith("call_") for call in message["tool_calls"])


async def test_the_clients_own_accumulation_of_a_stream(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="toy", messages=[user("Weather?")], tools=TOOLS, reasoning_effort="low"
    ) as stream:
        async for _ in stream:
            pass
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in final.message.tool_calls or []] == ARGUMENTS


@pytest.mark.parametrize("scripts", [[CALLS]])
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_on_offer_markup_is_text(client: AsyncOpenAI, fields: dict[str, Any]) -> None:
    answer = await ask(client, [user("Weather?")], reasoning_effort="none", **fields)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALLS, "stop")
    assert answer.usage.prompt_tokens < 100, "the tools are not in the prompt"


@pytest.mark.parametrize("scripts", [[CALLS]])
async def test_one_call_at_a_time(client: AsyncOpenAI) -> None:
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "reasoning_effort": "none"}
    answer = await ask(client, [user("Weather?")], **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert answer.choices[0].finish_reason == "tool_calls"
    message, _ = await streamed(client, [user("Weather?")], **fields)
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("scripts", [["Hello</think>"]])
async def test_chat_mode_is_without_reasoning(client: AsyncOpenAI) -> None:
    for fields in (
        {"reasoning_effort": "none"},
        {"reasoning_effort": openai.omit},
        {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        answer = await ask(client, [user("Hi")], **fields)
        assert answer.choices[0].message.content == "Hello</think>"
        assert "reasoning_content" not in answer.choices[0].message.model_extra
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("scripts", [["thinking about it"]])
async def test_an_answer_that_never_stops_thinking_has_no_content(client: AsyncOpenAI) -> None:
    answer = await ask(client, [user("Hi")], max_tokens=8)
    assert answer.choices[0].message.content is None
    assert answer.choices[0].message.model_extra["reasoning_content"] == "thinking"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


@pytest.mark.parametrize("scripts", [[CALLS]])
async def test_a_call_that_is_cut_off_is_not_made_whole(client: AsyncOpenAI) -> None:
    fields = {"tools": TOOLS, "reasoning_effort": "none"}
    cut = await ask(client, [user("Weather?")], max_tokens=100, **fields)
    stopped = await ask(client, [user("Weather?")], stop='"州', **fields)
    for answer, reason in ((cut, "length"), (stopped, "stop")):
        assert answer.choices[0].finish_reason == reason
        (call,) = answer.choices[0].message.tool_calls
        with pytest.raises(ValueError):
            json.loads(call.function.arguments)


@pytest.mark.parametrize("scripts", [[f"{EOS}x"]])
async def test_tokens_without_text_make_no_chunks(client: AsyncOpenAI) -> None:
    chunks = [chunk async for chunk in await ask(client, [user("Hi")], stream=True, reasoning_effort="none")]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]


async def test_refusals_are_the_clients_own_exceptions(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, [user("Hi")], tools=TOOLS, tool_choice="clock")
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_value")
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "wrong"}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, [user("Hi")], tools=[broken], tool_choice="required")
    assert caught.value.param == "tools"


@pytest.mark.parametrize("scripts", [["No.</think>I call nothing."]])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "stop_all"}}])
async def test_a_call_that_the_request_insists_on(client: AsyncOpenAI, choice: Any) -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "stop_all", "parameters": parameters}}
    tools = [tool] if choice == "required" else [*TOOLS, tool]
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    for effort in ("low", "none"):
        answer = await ask(client, [user("Hi")], reasoning_effort=effort, **fields)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("stop_all", "{}")
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        assert (answer.choices[0].message.model_extra.get("reasoning_content") == "No.") is (effort == "low")


STOP_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
STOP: Any = {"type": "function", "function": {"name": "stop", "parameters": STOP_PARAMETERS}}


@pytest.mark.parametrize("scripts", [["no end of thinking " * 20]])
async def test_a_thought_ends_where_the_request_says(client: AsyncOpenAI) -> None:
    for budget, reasoning in ((0, None), (6, "no end")):
        answer = await ask(client, [user("Hi")], max_tokens=20, extra_body={"thinking_token_budget": budget})
        assert (answer.choices[0].message.model_extra or {}).get("reasoning_content") == reasoning
        assert answer.choices[0].message.content


@pytest.mark.parametrize("scripts", [["no end of thinking " * 20]])
async def test_an_endless_thought_leaves_room_for_a_call_that_the_request_insists_on(client: AsyncOpenAI) -> None:
    fields = {"tools": [STOP], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    answer = await ask(client, [user("Hi")], **fields)
    assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["stop"]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 100


@pytest.mark.parametrize("scripts", [[CALLS]])
async def test_a_call_within_the_thought_is_not_cut_by_its_limit(client: AsyncOpenAI) -> None:
    limit = {"thinking_token_budget": len("I look.\n\n<x") + 30}
    answer = await ask(client, [user("Weather?")], tools=TOOLS, extra_body=limit)
    assert [json.loads(call.function.arguments) for call in answer.choices[0].message.tool_calls or []] == ARGUMENTS


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "clock"}, "tool_choice"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"thinking": "on"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"colour": True}}, "chat_template_kwargs"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "messages[0]"),
        ({"messages": [user("a"), {"role": "latest_reminder", "content": "b"}]}, "messages[1]"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    body = {"model": "toy", "messages": [user("Hi")], **fields}
    with pytest.raises(ApiError) as caught:
        plan_chat(decode_chat(json.dumps(body).encode()), V4Format())
    assert (caught.value.error.status, caught.value.error.param) == (400, param)
