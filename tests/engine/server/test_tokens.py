"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.server.conftest import MAX_MODEL_LEN, Harness
from tests.engine.server.test_http import CHAT, COMPLETIONS, HELLO, body, chat, post

PLAIN = {"chat_template_kwargs": {"thinking": False}}


@pytest.mark.parametrize("text", ["ab é 東", "<｜User｜>", ""])
async def test_a_text_and_back(engine: Harness, text: str) -> None:
    made = await post(engine, "/tokenize", {"model": "toy", "prompt": text, "add_special_tokens": False})
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), MAX_MODEL_LEN)
    assert made["token_strs"] is None
    assert await post(engine, "/detokenize", {"tokens": made["tokens"]}) == {"prompt": text}


async def test_a_text_is_what_a_completion_makes_of_it(engine: Harness) -> None:
    made = await post(engine, "/tokenize", {"prompt": "hello", "return_token_strs": True})
    answer = await post(engine, COMPLETIONS, body(prompt="hello", max_tokens=1))
    assert made["tokens"] == answer["choices"][0]["prompt_token_ids"]
    assert "".join(made["token_strs"]) == "hello"


async def test_a_chat_is_what_the_chat_makes_of_it(engine: Harness) -> None:
    made = await post(engine, "/tokenize", {"model": "toy", "messages": HELLO, **PLAIN})
    answer = await post(engine, CHAT, chat(max_tokens=1, return_token_ids=True, **PLAIN))
    assert made["tokens"] == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, 400, "messages[0]"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [272]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ],
)
async def test_what_cannot_be(engine: Harness, path: str, fields: dict[str, Any], status: int, param: str) -> None:
    response = await engine.client.post(path, json=fields)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (status, param), error["message"]
