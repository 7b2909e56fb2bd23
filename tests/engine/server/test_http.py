"""The OpenAI surface as a client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.engine.server.conftest import IMAGE_TOKEN_ID, MAX_MODEL_LEN, Harness
from tests.engine.serving.toy import expected

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = [40, 41, 42, 43, 44]
HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": PROMPT, "temperature": 0, "return_token_ids": True, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": HELLO, "temperature": 0, "max_tokens": 5, **fields}


async def post(engine: Harness, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    response = await engine.client.post(path, json=fields)
    answer = await response.json()
    assert response.status == 200, answer
    return dict(answer)


async def events(engine: Harness, path: str, fields: dict[str, Any]) -> list[Any]:
    """The data of every event; "[DONE]" as it is."""
    response = await engine.client.post(path, json={**fields, "stream": True})
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    text = (await response.read()).decode()
    assert all(part.startswith("data: ") for part in text.split("\n\n") if part)
    data = [part[6:] for part in text.split("\n\n") if part]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_completion_of_token_ids(engine: Harness) -> None:
    answer = await post(engine, COMPLETIONS, body(max_tokens=6))
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected(PROMPT, 6)
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_completions_default_to_16_tokens_and_chats_to_the_whole_context(engine: Harness) -> None:
    short = await post(engine, COMPLETIONS, body())
    assert short["usage"]["completion_tokens"] == 16
    long = await post(engine, CHAT, {"model": "toy", "messages": HELLO, "ignore_eos": True})
    assert long["usage"]["total_tokens"] == MAX_MODEL_LEN


async def test_several_prompts_are_several_choices(engine: Harness) -> None:
    answer = await post(engine, COMPLETIONS, body(prompt=[[50, 51], [60]], max_tokens=3))
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected([50, 51], 3), expected([60], 3)]
    streamed = await events(engine, COMPLETIONS, body(prompt=[[50, 51], [60]], max_tokens=3))
    for index, prompt in enumerate(([50, 51], [60])):
        chunks = [c for item in streamed[:-1] for c in item["choices"] if c["index"] == index]
        assert [t for c in chunks for t in c.get("token_ids", [])] == expected(prompt, 3)


async def test_a_stream_says_the_same_as_the_whole_answer(engine: Harness) -> None:
    whole = await post(engine, COMPLETIONS, body(max_tokens=20))
    streamed = await events(engine, COMPLETIONS, body(max_tokens=20, stream_options={"include_usage": True}))
    assert streamed[-1] == "[DONE]"
    *chunks, usage = streamed[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 20
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}  # the first request left its first block


async def test_a_chat_stream_begins_with_the_role(engine: Harness) -> None:
    streamed = await events(engine, CHAT, chat())
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed[0]["object"] == "chat.completion.chunk"
    whole = await post(engine, CHAT, chat())
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in streamed[:-1])
    assert text == whole["choices"][0]["message"]["content"]


async def test_usage_can_come_with_every_chunk(engine: Harness) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = await events(engine, COMPLETIONS, body(max_tokens=4, stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in streamed[:-2] if c["usage"]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_a_stop_string_ends_the_text_before_it_on_both_ways(engine: Harness) -> None:
    full = (await post(engine, COMPLETIONS, body(max_tokens=40)))["choices"][0]["text"]
    stop = full[7:9]
    cut = full[: full.index(stop)]
    whole = (await post(engine, COMPLETIONS, body(max_tokens=40, stop=["never seen", stop])))["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (cut, "stop")
    streamed = await events(engine, COMPLETIONS, body(max_tokens=40, stop=stop))
    assert "".join(c["choices"][0]["text"] for c in streamed[:-1]) == cut
    assert streamed[-2]["choices"][0]["finish_reason"] == "stop"
    assert await engine.all_free()


async def test_a_seed_makes_sampling_repeatable_and_no_seed_does_not(engine: Harness) -> None:
    fields = body(temperature=5.0, max_tokens=20, ignore_eos=True)
    seeded = [(await post(engine, COMPLETIONS, {**fields, "seed": 3}))["choices"][0]["token_ids"] for _ in range(2)]
    free = [(await post(engine, COMPLETIONS, fields))["choices"][0]["token_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert free[0] != free[1]


async def test_a_stop_token_ends_the_answer_and_has_no_text(engine: Harness) -> None:
    tokens = expected(PROMPT, 12)
    position = next(i for i, token in enumerate(tokens) if i >= 3 and token not in tokens[:i])
    answer = await post(engine, COMPLETIONS, body(max_tokens=12, stop_token_ids=[tokens[position]]))
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (tokens[: position + 1], "stop")
    before = await post(engine, COMPLETIONS, body(max_tokens=position))
    assert choice["text"] == before["choices"][0]["text"]


async def test_no_stop_string_counts_before_min_tokens(engine: Harness) -> None:
    full = (await post(engine, COMPLETIONS, body(max_tokens=12)))["choices"][0]["text"]
    stopped = await post(engine, COMPLETIONS, body(max_tokens=12, stop=full[1]))
    assert stopped["choices"][0]["finish_reason"] == "stop"
    later = await post(engine, COMPLETIONS, body(max_tokens=12, stop=full[1], min_tokens=12))
    assert later["choices"][0]["text"] == full


async def test_a_bias_and_a_penalty_reach_the_sampler(engine: Harness) -> None:
    biased = await post(engine, COMPLETIONS, body(max_tokens=4, logit_bias={"30": 100}))
    assert biased["choices"][0]["token_ids"] == [30] * 4
    penalized = await post(
        engine, COMPLETIONS, body(max_tokens=4, logit_bias={"30": 50, "31": 49.5}, frequency_penalty=1)
    )
    assert penalized["choices"][0]["token_ids"] == [30, 31, 30, 31]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        (COMPLETIONS, {"model": "other"}, 404, "model", "model_not_found"),
        (COMPLETIONS, {"max_tokens": -1}, 400, "max_tokens", None),
        (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens", None),
        (COMPLETIONS, {"max_tokens": "many"}, 400, "max_tokens", None),
        (COMPLETIONS, {"max_tokens": 60}, 400, "messages", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [20] * 64}, 400, "messages", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "x" * 100}, 400, "messages", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [300]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": []}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": 5}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [20, IMAGE_TOKEN_ID]}, 400, "prompt", None),
        (COMPLETIONS, {"temperature": -0.1}, 400, "temperature", None),
        (COMPLETIONS, {"temperature": True}, 400, "temperature", None),
        (COMPLETIONS, {"top_p": 0}, 400, "top_p", None),
        (COMPLETIONS, {"top_p": 1.5}, 400, "top_p", None),
        (COMPLETIONS, {"top_k": -2}, 400, "top_k", None),
        (COMPLETIONS, {"stop": ""}, 400, "stop", "invalid_value"),
        (COMPLETIONS, {"stop": ["a"] * 17}, 400, "stop", "invalid_value"),
        (COMPLETIONS, {"n": 0}, 400, "n", None),
        (COMPLETIONS, {"n": 129}, 400, "n", None),
        (COMPLETIONS, {"n": 65, "prompt": [[20], [21]]}, 400, "n", None),
        (COMPLETIONS, {"n": 2, "best_of": 3}, 400, "best_of", "unsupported_value"),
        (COMPLETIONS, {"logprobs": 21}, 400, "logprobs", None),
        (COMPLETIONS, {"logprobs": True}, 400, "logprobs", None),
        (COMPLETIONS, {"prompt_logprobs": -1}, 400, "prompt_logprobs", None),
        (COMPLETIONS, {"suffix": "x"}, 400, "suffix", "unsupported_value"),
        (COMPLETIONS, {"presence_penalty": 2.5}, 400, "presence_penalty", None),
        (COMPLETIONS, {"frequency_penalty": "some"}, 400, "frequency_penalty", None),
        (COMPLETIONS, {"repetition_penalty": 0}, 400, "repetition_penalty", None),
        (COMPLETIONS, {"min_p": 1.5}, 400, "min_p", None),
        (COMPLETIONS, {"max_tokens": 4, "min_tokens": 5}, 400, "min_tokens", None),
        (COMPLETIONS, {"stop_token_ids": [272]}, 400, "stop_token_ids", "invalid_value"),
        (COMPLETIONS, {"logit_bias": {"272": 1}}, 400, "logit_bias", None),
        (COMPLETIONS, {"logit_bias": {"-1": 1}}, 400, "logit_bias", None),
        (COMPLETIONS, {"logit_bias": {"20": 101}}, 400, "logit_bias", None),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, 400, "stream_options", None),
        (COMPLETIONS, {"headrace_ticket": {}}, 400, "headrace_ticket", None),
        (CHAT, {"messages": []}, 400, "messages", None),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0]", None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]", None),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, 400, "messages[1]", None),
        (CHAT, {"tools": [{"type": "function"}]}, 400, "tools", None),
        (COMPLETIONS, {"tools": [{"type": "function"}]}, 400, "tools", "unsupported_value"),
        (CHAT, {"logprobs": 2}, 400, "logprobs", None),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", None),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
        (CHAT, {"max_completion_tokens": -5}, 400, "max_completion_tokens", None),
        (CHAT, {"chat_template_kwargs": {"thinking": "yes"}}, 400, "chat_template_kwargs", None),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_reason(
    engine: Harness, path: str, fields: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    base = body() if path == COMPLETIONS else chat()
    for stream in (False, True):
        if stream and "stream_options" in fields:
            continue
        response = await engine.client.post(path, json={**base, **fields, "stream": stream})
        error = (await response.json())["error"]
        assert (response.status, error["param"], error["code"]) == (status, param, code), error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    assert engine.scheduler.is_empty


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": None, "echo": False, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"user": "someone", "metadata": {"a": 1}, "logit_bias": {}, "suffix": None},
    ],
)
async def test_fields_that_ask_for_what_happens_anyway_are_fine(engine: Harness, fields: dict[str, Any]) -> None:
    await post(engine, COMPLETIONS, body(max_tokens=1, **fields))


@pytest.mark.parametrize(
    ("data", "param"), [(b"{", None), (b"[]", None), (b"\xff", None), (b"", None), (b'{"prompt": "a"}', "model")]
)
async def test_malformed_bodies(engine: Harness, data: bytes, param: str | None) -> None:
    response = await engine.client.post(COMPLETIONS, data=data)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error


@pytest.mark.parametrize(("method", "path", "status"), [("GET", COMPLETIONS, 405), ("POST", "/v1/nothing", 404)])
async def test_unknown_routes_and_methods(engine: Harness, method: str, path: str, status: int) -> None:
    response = await engine.client.request(method, path)
    assert response.status == status
    assert (await response.json())["error"]["message"]


async def test_a_body_that_is_too_large(engine: Harness) -> None:
    response = await engine.client.post(COMPLETIONS, data=b" " * (65 << 20))
    assert response.status == 413
    assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_not_what_its_encoding_says(engine: Harness) -> None:
    response = await engine.client.post(COMPLETIONS, data=b"no gzip", headers={"Content-Encoding": "gzip"})
    assert response.status == 400
    assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_request_ids_are_echoed(engine: Harness) -> None:
    for fields in (body(max_tokens=1), body(max_tokens=1, stream=True), body(max_tokens=-1)):
        response = await engine.client.post(COMPLETIONS, json=fields, headers={"X-Request-Id": "my-id"})
        assert response.headers["X-Request-Id"] == "my-id"
    response = await engine.client.get("/health")
    assert len(response.headers["X-Request-Id"]) == 32


@pytest.mark.parametrize("step_seconds", [0.01])
async def test_a_client_that_leaves_aborts_its_request(engine: Harness) -> None:
    for stream in (False, True):
        fields = body(prompt=[20], max_tokens=63, ignore_eos=True, stream=stream)
        request = asyncio.create_task(engine.client.post(COMPLETIONS, json=fields))
        for _ in range(500):
            await asyncio.sleep(0.002)
            if engine.scheduler.num_running:
                break
        if stream:
            (await request).close()
        else:
            request.cancel()
        assert await engine.all_free()
        assert engine.frontend.num_in_flight == 0
        assert engine.scheduler.generation_tokens_total < 60, "it was not aborted, it ended"
    metrics = await (await engine.client.get("/metrics")).text()
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="toy"} 2.0' in metrics


async def test_many_requests_at_once_get_their_own_tokens(engine: Harness) -> None:
    prompts = [[16 + i, 20 + i, 30] for i in range(20)]
    answers = await asyncio.gather(
        *(post(engine, COMPLETIONS, body(prompt=prompt, max_tokens=10, ignore_eos=True)) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == expected(prompt, 10)
    assert await engine.all_free()


@pytest.mark.parametrize("max_waiting", [1])
async def test_beyond_its_queue_the_engine_says_429(engine: Harness) -> None:
    requests = [
        engine.client.post(COMPLETIONS, json=body(prompt=[20 + i], max_tokens=40, ignore_eos=True)) for i in range(30)
    ]
    responses = await asyncio.gather(*requests)
    statuses = [response.status for response in responses]
    assert set(statuses) == {200, 429}
    refused = responses[statuses.index(429)]
    assert refused.headers["Retry-After"] == "1"
    assert (await refused.json())["error"]["code"] == "overloaded"


async def test_draining_refuses_new_requests_and_readiness(engine: Harness) -> None:
    assert (await engine.client.get("/ready")).status == 200
    response = await engine.client.post("/drain")
    assert await response.json() == {"draining": True, "in_flight": 0}
    assert (await engine.client.get("/ready")).status == 503
    assert (await engine.client.get("/health")).status == 200
    response = await engine.client.post(COMPLETIONS, json=body())
    assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize(("query", "status", "seconds"), [("?seconds=0", 200, 0.0), ("?seconds=soon", 400, None)])
async def test_draining_may_be_told_how_long_the_end_may_take(
    engine: Harness, query: str, status: int, seconds: float | None
) -> None:
    before = engine.frontend.drain_seconds
    response = await engine.client.post(f"/drain{query}")
    assert response.status == status
    assert engine.frontend.drain_seconds == (before if seconds is None else seconds)


async def test_models_state_and_metrics(engine: Harness) -> None:
    await post(engine, COMPLETIONS, body(max_tokens=3))
    models = await (await engine.client.get("/v1/models")).json()
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("toy", MAX_MODEL_LEN)]
    await asyncio.sleep(0.3)  # the rank reports at most every 100 ms
    state = await (await engine.client.get("/state")).json()
    assert state["ranks"][0]["generation_tokens_total"] == 3
    assert state["ranks"][0]["num_free_blocks"] == state["ranks"][0]["num_blocks"]
    metrics = await (await engine.client.get("/metrics")).text()
    assert 'vllm:generation_tokens_total{engine="0",model_name="toy"} 3.0' in metrics
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="toy"} 1.0' in metrics
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="toy"} 1.0' in metrics


async def test_the_state_tells_how_answers_have_been_lately(engine: Harness) -> None:
    """One request of six tokens: its times are of the last half minute, and its prompt was computed in it."""
    await post(engine, COMPLETIONS, body(max_tokens=6))
    async with asyncio.timeout(20):  # a rank says how it is now and then
        while True:
            state = await (await engine.client.get("/state")).json()
            recent, rank = state["recent"], state["ranks"][0]
            if rank["computed_prompt_tokens_total"]:
                break
            await asyncio.sleep(0.02)
    assert recent["window_seconds"] == 30
    assert [sum(recent[name]) for name in ("ticket", "prompt", "first_token")] == [0, 1, 1]
    assert 1 <= sum(recent["inter_token"]) <= 5  # tokens that come together are one observation
    assert len(recent["inter_token"]) == len(recent["bounds_seconds"]) + 1
    assert (rank["computed_prompt_tokens_total"], rank["recent_prompt_tokens"]) == (len(PROMPT), len(PROMPT))
    assert 0 < rank["prompt_seconds_total"] < 30
    assert rank["num_queued_tokens"] == 0


@pytest.mark.parametrize("step_seconds", [0.05])
async def test_the_time_to_the_first_token_begins_with_the_requests_arrival(engine: Harness) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        data = json.dumps(body(max_tokens=1)).encode()
        yield data[:10]
        await asyncio.sleep(0.3)  # an upload counts, as the client counts it
        yield data[10:]

    assert (await engine.client.post(COMPLETIONS, data=slowly())).status == 200
    metrics = await (await engine.client.get("/metrics")).text()
    name = 'vllm:time_to_first_token_seconds_sum{engine="0",model_name="toy"} '
    (line,) = [line for line in metrics.splitlines() if line.startswith(name)]
    assert float(line.removeprefix(name)) >= 0.3


async def test_refused_and_failed_requests_are_counted_once(engine: Harness) -> None:
    await engine.client.post(COMPLETIONS, json=body(max_tokens=-1))
    metrics = await (await engine.client.get("/metrics")).text()
    assert 'headrace:request_failures_total{model_name="toy",status="400"} 1.0' in metrics
    assert "abort" not in metrics.split("# TYPE vllm:request_success")[1].split("# HELP")[0]


@pytest.mark.parametrize(("step_seconds", "timeout_seconds"), [(0.05, 0.3)])
async def test_a_request_takes_no_longer_than_its_deadline(engine: Harness) -> None:
    response = await engine.client.post(COMPLETIONS, json=body(prompt=[20], max_tokens=60, ignore_eos=True))
    assert (response.status, (await response.json())["error"]["code"]) == (504, "timeout")
    streamed = await events(engine, COMPLETIONS, body(prompt=[20], max_tokens=60, ignore_eos=True))
    assert streamed[-1]["error"]["code"] == "timeout"
    assert await engine.all_free()
