"""`response_format` and `structured_outputs` from the door to the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.server.conftest import Harness, Sizes
from tests.engine.server.test_http import CHAT, COMPLETIONS, body, chat, events, post

CLOSED = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "degrees": {"type": "boolean"}},
    "required": ["city", "degrees"],
    **CLOSED,
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}


async def test_an_answer_is_what_its_schema_says_whole_and_streamed(engine: Harness) -> None:
    fields = chat(response_format=json_schema(SCHEMA), max_tokens=40, chat_template_kwargs={"thinking": False})
    answer = await post(engine, CHAT, fields)
    (choice,) = answer["choices"]
    assert json.loads(choice["message"]["content"])["city"] in ("Oslo", "Rome")
    assert choice["finish_reason"] == "stop"
    streamed = await events(engine, CHAT, fields)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed[:-1])
    assert text == choice["message"]["content"]


@pytest.mark.parametrize("sizes", [Sizes(max_model_len=1024, num_blocks=300, max_batch_tokens=1024)])
async def test_a_thought_is_free_and_the_answer_behind_it_is_not(engine: Harness) -> None:
    end = engine.tokenizer.marker_id("</think>")
    fields = chat(structured_outputs={"choice": ["yes", "no"]}, logit_bias={str(end): 100}, max_tokens=8)
    answer = await post(engine, CHAT, {**fields, "chat_template_kwargs": {"thinking": True}})
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ({"choice": ["red", "green"]}, {"red", "green"}),
        ({"regex": "(ab){2}"}, {"abab"}),
        ({"grammar": 'start: "<" ("x" | "y") ">"'}, {"<x>", "<y>"}),
        ({"json": {"enum": [17]}}, {"17"}),
        ({"json": '{"const": true}'}, {"true"}),
    ],
)
async def test_every_kind_of_structured_output(engine: Harness, wanted: Any, allowed: set[str]) -> None:
    answer = await post(engine, COMPLETIONS, body(structured_outputs=wanted, max_tokens=30))
    assert answer["choices"][0]["text"] in allowed
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": json_schema({"type": "wizard"})}, "response_format"),
        ({"response_format": json_schema({"$ref": "https://example.org/schema"})}, "response_format"),
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * (300 << 10)}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_what_is_no_grammar_is_refused_with_its_reason(
    engine: Harness, fields: dict[str, Any], param: str
) -> None:
    response = await engine.client.post(CHAT, json=chat(**fields))
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error["message"]
    assert engine.scheduler.is_empty
