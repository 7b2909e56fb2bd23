"""`logprobs`, `top_logprobs`, `prompt_logprobs`, `echo` and `n`, as clients of OpenAI and vLLM know them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.engine.server.conftest import Harness
from tests.engine.server.test_http import CHAT, COMPLETIONS, PROMPT, body, chat, events, post
from tests.engine.serving.toy import VOCAB, expected

# The toy gives one token the logit 1 and all others 0.
LIKELIEST = 1 - math.log(math.e + VOCAB - 1)
OTHER = -math.log(math.e + VOCAB - 1)


async def test_a_completion_with_logprobs(engine: Harness) -> None:
    answer = await post(engine, COMPLETIONS, body(max_tokens=4, logprobs=2))
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([LIKELIEST] * 4, abs=1e-5)
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == max(top.values())
    assert logprobs["text_offset"][0] == 0
    streamed = await events(engine, COMPLETIONS, body(max_tokens=4, logprobs=2))
    pieces = [c["choices"][0]["logprobs"] for c in streamed[:-1] if c["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == logprobs[name]


async def test_an_unlikely_token_is_named_beside_the_likeliest(engine: Harness) -> None:
    answer = await post(engine, COMPLETIONS, body(max_tokens=1, logprobs=1, logit_bias={"200": 100}))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([OTHER], abs=1e-5)
    assert sorted(logprobs["top_logprobs"][0].values()) == pytest.approx([OTHER, LIKELIEST], abs=1e-5)


async def test_a_chat_with_logprobs(engine: Harness) -> None:
    whole = await post(engine, CHAT, chat(logprobs=True, top_logprobs=2))
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    for entry in content:
        assert entry["logprob"] == pytest.approx(LIKELIEST, abs=1e-5)
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    streamed = await events(engine, CHAT, chat(logprobs=True, top_logprobs=2))
    pieces = [c["choices"][0]["logprobs"] for c in streamed[:-1] if c["choices"][0]["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == content
    plain = await post(engine, CHAT, chat(logprobs=True))
    assert all(entry["top_logprobs"] == [] for entry in plain["choices"][0]["logprobs"]["content"])


async def test_echo_puts_the_prompt_and_its_scores_first(engine: Harness) -> None:
    prompt = "ab é"
    plain = await post(engine, COMPLETIONS, body(prompt=prompt, max_tokens=3))
    echoed = await post(engine, COMPLETIONS, body(prompt=prompt, max_tokens=3, echo=True))
    assert echoed["choices"][0]["text"] == prompt + plain["choices"][0]["text"]
    assert echoed["choices"][0]["logprobs"] is None
    scored = await post(engine, COMPLETIONS, body(prompt=prompt, max_tokens=3, echo=True, logprobs=0))
    logprobs = scored["choices"][0]["logprobs"]
    num_tokens = scored["usage"]["total_tokens"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        num_tokens
    ] * 4
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["tokens"][3:5] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
    for extra in ({}, {"logprobs": 0}):
        streamed = await events(engine, COMPLETIONS, body(prompt=prompt, max_tokens=3, echo=True, **extra))
        assert "".join(c["choices"][0]["text"] for c in streamed[:-1]) == echoed["choices"][0]["text"]
        pieces = [c["choices"][0]["logprobs"] for c in streamed[:-1] if c["choices"][0]["logprobs"]]
        assert [t for piece in pieces for t in piece["tokens"]] == (logprobs["tokens"] if extra else [])
        assert [t for piece in pieces for t in piece["text_offset"]] == (logprobs["text_offset"] if extra else [])


async def test_prompt_logprobs(engine: Harness) -> None:
    answer = await post(engine, COMPLETIONS, body(max_tokens=1, prompt_logprobs=1))
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for position, entry in enumerate(others, 1):
        likeliest = expected(PROMPT[:position], 1)[0]
        assert set(entry) == {str(likeliest), str(PROMPT[position])}
        assert entry[str(likeliest)]["rank"] == 1
        assert entry[str(likeliest)]["logprob"] == pytest.approx(LIKELIEST, abs=1e-5)
    answer = await post(engine, CHAT, chat(prompt_logprobs=0))
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_n_choices_of_each_prompt_are_in_its_order_and_have_seeds_of_their_own(engine: Harness) -> None:
    fields = body(prompt=[[50, 51], [60]], n=2, max_tokens=3, temperature=5.0, seed=7)
    answer = await post(engine, COMPLETIONS, fields)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in choices] == [[50, 51], [50, 51], [60], [60]]
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    alone = await post(engine, COMPLETIONS, {**fields, "prompt": [50, 51], "n": 1})
    assert choices[0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 12)
    streamed: list[Any] = await events(engine, COMPLETIONS, {**fields, "stream_options": {"include_usage": True}})
    for choice in choices:
        pieces = [c for item in streamed[:-1] for c in item["choices"] if c["index"] == choice["index"]]
        assert [t for c in pieces for t in c.get("token_ids", [])] == choice["token_ids"]
    assert streamed[-2]["usage"]["prompt_tokens"] == 3
    assert await engine.all_free()
