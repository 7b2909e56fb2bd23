"""Functions with `strict: true`, as the clients of OpenAI and Anthropic ask for them: calls keep to their schemas."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel


class Alarm(BaseModel):
    seconds: int
    level: Literal["low", "high"]


ALARM: Any = openai.pydantic_function_tool(Alarm, name="alarm")
SCHEMA: Any = ALARM["function"]["parameters"]
HELLO: Any = [{"role": "user", "content": "Wake me."}]
THOUGHT = "A call: ring at 5.</think>As you like."


def wish(level: str) -> str:
    """A call that the model would like to make."""
    return f"""{THOUGHT}

<｜DSML｜tool_calls>
<｜DSML｜invoke name="alarm">
<｜DSML｜parameter name="seconds" string="false">5</｜DSML｜parameter>
<｜DSML｜parameter name="level" string="true">{level}</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


@pytest.fixture
def scripts() -> list[str]:
    return [wish("as loud as can be")]


async def test_openai_parses_the_arguments_whole_and_streamed(client: AsyncOpenAI) -> None:
    fields: Any = {"model": "toy", "messages": HELLO, "tools": [ALARM], "reasoning_effort": "low", "temperature": 0}
    fields["parallel_tool_calls"] = False  # another one would not be in the script
    parsed = await client.chat.completions.parse(**fields)
    async with client.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    for answer in (parsed, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Alarm)
        assert call.function.parsed_arguments.seconds == 5
        assert answer.choices[0].message.content == "As you like."
        assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(("is_strict", "levels"), [(True, ("low", "high")), (False, ("as loud as can be",))])
async def test_the_same_in_the_other_apis(
    client: AsyncOpenAI, anthropic_client: AsyncAnthropic, is_strict: bool, levels: tuple[str, ...]
) -> None:
    function: Any = {"type": "function", "name": "alarm", "parameters": SCHEMA, "strict": is_strict}
    response = await client.responses.create(
        model="toy",
        input=HELLO,
        tools=[function],
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        temperature=0,
    )
    (item,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(item.arguments)["level"] in levels
    tool: Any = {"name": "alarm", "input_schema": SCHEMA, "strict": is_strict}
    message = await anthropic_client.messages.create(
        model="toy",
        messages=HELLO,
        tools=[tool],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
        max_tokens=1000,
    )
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert block.input["level"] in levels


FORM: Any = {
    "type": "object",
    "properties": {"done": {"const": True}},
    "required": ["done"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "scripts", [['So.</think>{"done": true}'], ["So.</think>" + wish("high").partition(".</think>As you like.")[2]]]
)
async def test_an_answer_has_the_form_or_consists_of_calls(client: AsyncOpenAI, scripts: list[str]) -> None:
    answer = await client.chat.completions.create(
        model="toy",
        messages=HELLO,
        tools=[ALARM],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}},
        reasoning_effort="low",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=300,
    )
    message, reason = answer.choices[0].message, answer.choices[0].finish_reason
    if "DSML" in scripts[0]:
        assert [json.loads(call.function.arguments) for call in message.tool_calls or []] == [  # type: ignore[union-attr]
            {"seconds": 5, "level": "high"}
        ]
        assert (message.content, reason) == (None, "tool_calls")
    else:
        assert (json.loads(message.content or ""), reason) == ({"done": True}, "stop")
        assert message.tool_calls is None


@pytest.mark.parametrize("scripts", [[f"{THOUGHT} No call, 5 < 6."]])
async def test_an_answer_without_calls_is_free(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="toy", messages=HELLO, tools=[ALARM], reasoning_effort="low", temperature=0
    )
    assert answer.choices[0].message.content == "As you like. No call, 5 < 6."
    assert answer.choices[0].finish_reason == "stop"


async def test_a_schema_that_is_beyond_strictness_is_refused(client: AsyncOpenAI) -> None:
    for parameters, said in (
        ({**SCHEMA, "additionalProperties": True}, "additionalProperties must be false"),
        ({**SCHEMA, "properties": {"seconds": {"type": "wizard"}, "level": {}}}, "tools: "),
    ):
        tool: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await client.chat.completions.create(model="toy", messages=HELLO, tools=[tool])
        assert refused.value.param == "tools"
