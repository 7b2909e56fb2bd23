"""`/v1/responses` as OpenAI's own client sees it, without state on the server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.engine.server.test_chat import ANSWER, ARGUMENTS, REASONING, SCRIPTS

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": name,
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    }
    for name in ("get_weather", "clock")
]


@pytest.fixture
def scripts() -> list[str]:
    return SCRIPTS


async def ask(client: AsyncOpenAI, messages: Any, **fields: Any) -> Any:
    return await client.responses.create(
        **{"model": "toy", "input": messages, "reasoning": {"effort": "low"}, "temperature": 0, **fields}
    )


async def test_an_answer_with_reasoning_and_calls_and_the_turn_after_it(client: AsyncOpenAI) -> None:
    question = {"role": "user", "content": "How is the weather?"}
    first = await ask(client, [question], instructions="Be brief.", tools=TOOLS)
    assert (first.status, first.instructions, first.store) == ("completed", "Be brief.", False)
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == REASONING
    assert first.output_text.strip() == "I look."
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("get_weather", ARGUMENTS[0]),
        ("clock", ARGUMENTS[1]),
    ]
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
    history = [question, *(item.model_dump(exclude_none=True) for item in first.output), *results]
    second = await ask(client, history, instructions="Be brief.", tools=TOOLS)
    assert second.output_text == ANSWER


async def test_a_stream_says_the_same_in_events(client: AsyncOpenAI) -> None:
    """The client's own accumulation fails on events that are out of order or do not fit."""
    async with client.responses.stream(
        model="toy", input="hi", reasoning={"effort": "low"}, temperature=0, tools=TOOLS
    ) as stream:
        seen = [event async for event in stream]
        final = await stream.get_final_response()
    numbers = [event.sequence_number for event in seen]
    assert numbers == list(range(len(seen)))
    kinds = [event.type for event in seen]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text.strip() == "I look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [json.loads(item.arguments) for item in final.output if item.type == "function_call"] == ARGUMENTS
    assert final.usage is not None


async def test_what_is_cut_off_is_incomplete(client: AsyncOpenAI) -> None:
    response = await ask(client, "hi", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    kinds = [event.type async for event in await ask(client, "hi", max_output_tokens=3, stream=True)]
    assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize("scripts", [["</think>yes"]])
async def test_structured_output(client: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_flexible": False}
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response = await ask(client, "hi", text=wanted, reasoning={"effort": "none"}, max_output_tokens=20)
    assert json.loads(response.output_text) == {"a": 1}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}])
async def test_a_call_that_is_insisted_on(client: AsyncOpenAI, choice: Any) -> None:
    tools = [{"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}]
    response = await ask(
        client,
        "hi",
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=200,
        reasoning={"effort": "none"},
    )
    assert next(item.name for item in response.output if item.type == "function_call") == "clock"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages[0]"),
        ({"max_output_tokens": 0}, "max_completion_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
    ],
)
async def test_what_is_not_supported_is_refused_with_its_reason(
    client: AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, **{"messages": fields.pop("input", "hi"), **fields})
    assert refused.value.param == param


@pytest.mark.parametrize(("scripts", "step_seconds", "timeout_seconds"), [(["x" * 200], 0.02, 0.5)])
async def test_an_error_in_the_middle_of_a_stream_is_raised(client: AsyncOpenAI) -> None:
    stream = await ask(client, "hi", stream=True, reasoning={"effort": "none"})
    with pytest.raises(openai.APIError, match="not done within"):
        [_ async for _ in stream]
