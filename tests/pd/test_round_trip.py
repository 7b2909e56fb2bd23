"""Prefill and decode apart give the tokens of both together, which are those of an independent implementation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.pd.engines import (
    BLOCK,
    TIMEOUT,
    Engine,
    Events,
    completion,
    generate,
    pd_tokens,
    post_prefill,
    prompts_of,
    round_trip,
    running,
)
from tests.pd.reference import Reference

pytestmark = pytest.mark.slow  # real processes

# Every residue modulo the block, and around the tiny model's boundaries: ratios 4 and 8, window 8, index from 20 on.
LENGTHS = [1, 2, 3, 4, 5, *range(BLOCK - 1, 3 * BLOCK + 2), 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 130, 200, 2000]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    engines = Engine("--role", "prefill", "--max-batch-tokens", "40"), Engine("--role", "decode")
    with running(*engines):
        yield engines


def test_apart_and_together_give_the_tokens_of_transformers(
    unified: Engine, pair: tuple[Engine, Engine], reference: Reference
) -> None:
    prefill, decode = pair
    for prompt in prompts_of(LENGTHS):
        expected = reference.tokens(prompt, 8)
        assert generate(unified.url, prompt) == expected, f"together, {len(prompt)} tokens"
        assert pd_tokens(prefill.url, decode.url, prompt) == expected, f"apart, {len(prompt)} tokens"
    prefill.wait_all_free()
    decode.wait_all_free()


def test_32_different_prompts_at_once(unified: Engine, pair: tuple[Engine, Engine], reference: Reference) -> None:
    prefill, decode = pair
    prompts = prompts_of([5 + 3 * i for i in range(32)], first=50)
    expected = [reference.tokens(prompt, 8) for prompt in prompts]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda prompt: generate(unified.url, prompt), prompts)) == expected
        assert list(pool.map(lambda prompt: pd_tokens(prefill.url, decode.url, prompt), prompts)) == expected


def test_cached_tokens_are_prefills_own_hits_never_what_was_received(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts_of([3 * BLOCK + 2], first=90)
    body = completion(prompt)
    first, second = (round_trip(prefill.url, decode.url, body) for _ in range(2))
    assert first["leg"] == {"status": "pushed", "num_cached_tokens": 0}
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK
    assert first["choices"] == second["choices"]


def test_both_ranks_count_a_transfer(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    counters = [(prefill, "headrace:kv_pushes_total"), (decode, "headrace:kv_receives_total")]
    before = [engine.metric(name) for engine, name in counters]
    (prompt,) = prompts_of([2 * BLOCK + 1], first=92)
    pd_tokens(prefill.url, decode.url, prompt)
    deadline = time.monotonic() + 10
    # Ranks report now and then: what was read before may have lagged behind what was done before.
    while not all(engine.metric(name) > count for (engine, name), count in zip(counters, before, strict=True)):
        assert time.monotonic() < deadline, f"{before} has not become more"
        time.sleep(0.1)
    assert decode.metric("headrace:num_transfer_peers") == 1
    assert decode.metric("headrace:kv_receive_failures_total") == 0


def test_a_stream_carries_the_ticket_and_then_the_clients_own_events(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts_of([20], first=95)
    body = completion(prompt, stream=True)
    headers = {"x-headrace-leg": "decode"}
    with httpx.stream("POST", f"{decode.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT) as response:
        events = iter(Events(response))
        name, ticket = next(events)
        assert name == "ticket"
        with ThreadPoolExecutor(1) as pool:
            leg = pool.submit(post_prefill, prefill.url, body, ticket)
            rest = list(events)
        assert leg.result().status_code == 200
    assert {name for name, _ in rest} == {""}
    assert rest[-1] == ("", "[DONE]")
    tokens = [t for _, data in rest[:-1] for t in json.loads(data)["choices"][0].get("token_ids", [])]
    assert tokens == pd_tokens(prefill.url, decode.url, prompt)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({}, "content"),
        ({"reasoning_effort": "high", "tools": [{"type": "function", "function": {"name": "f"}}]}, "reasoning_content"),
    ],
)
def test_chat_goes_through_both_legs(
    unified: Engine, pair: tuple[Engine, Engine], fields: dict[str, object], part: str
) -> None:
    prefill, decode = pair
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Where does the water go?"}]}
    body |= {"max_tokens": 6, "temperature": 0, **fields}
    path = "/v1/chat/completions"
    alone = httpx.post(f"{unified.url}{path}", json=body, timeout=TIMEOUT).json()
    apart = round_trip(prefill.url, decode.url, body, path)
    assert apart["choices"] == alone["choices"]
    assert apart["choices"][0]["message"][part]


def test_sampling_with_a_seed_is_the_same_apart_and_together(unified: Engine, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts_of([21], first=99)
    body = completion(prompt, temperature=1.0, top_p=0.9, seed=7)
    apart = round_trip(prefill.url, decode.url, body)["choices"][0]["token_ids"]
    assert apart == generate(unified.url, prompt, temperature=1.0, top_p=0.9, seed=7)


def test_the_clients_leaving_frees_the_blocks_of_both_engines(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts_of([30], first=70)
    body = completion(prompt)
    headers = {"x-headrace-leg": "decode"}
    with httpx.stream("POST", f"{decode.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT) as response:
        _, ticket = next(iter(Events(response)))
    decode.wait_all_free()  # nobody had taken the ticket, so nobody may write
    reply = post_prefill(prefill.url, body, ticket)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "kv_transfer_failed")
    decode.wait_all_free()
    prefill.wait_all_free()


def test_a_prefill_leg_that_is_closed_ends_the_decode_leg_with_an_error_to_retry(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts_of([4000], first=72)  # a hundred chunks
    body = completion(prompt)
    url, headers = f"{decode.url}/v1/completions", {"x-headrace-leg": "decode"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT) as response:
        events = iter(Events(response))
        _, ticket = next(events)
        with pytest.raises(httpx.ReadTimeout):
            post_prefill(prefill.url, body, ticket, timeout=httpx.Timeout(60, read=0.5))
        name, data = next(events)
    outcome = json.loads(data)
    assert (name, outcome["status"], outcome["retriable"]) == ("error", 503, True)
    assert outcome["body"]["error"]["code"] == "kv_transfer_failed"
    prefill.wait_all_free()
    decode.wait_all_free()


BAD_BODIES = [
    ({"model": "nobody"}, 404, "model_not_found"),
    ({"max_tokens": -1}, 400, None),
    ({"prompt": [20] * 5000}, 400, "context_length_exceeded"),
    ({"prompt": [20, 999_999]}, 400, None),
    ({"n": 0}, 400, None),
]


@pytest.mark.parametrize(("change", "status", "code"), BAD_BODIES)
@pytest.mark.parametrize("leg", ["decode", "prefill"])
def test_a_bad_request_is_refused_plainly_and_reserves_nothing(
    pair: tuple[Engine, Engine], leg: str, change: dict[str, object], status: int, code: str | None
) -> None:
    engine = pair[0] if leg == "prefill" else pair[1]
    body = {**completion([20, 21, 22]), **change}
    headers = {"x-headrace-leg": leg}
    if leg == "prefill":
        reply = post_prefill(engine.url, body, _ticket(pair, [20, 21, 22]))
    else:
        reply = httpx.post(f"{engine.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT)
    _assert_refused(reply, status, code)
    for each in pair:
        each.wait_all_free()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("leg", ["decode", "prefill"])
@pytest.mark.parametrize("data", [b"", b"{", b'{"model": "tiny",', b"[1]", b'"text"', b"\xff\xfe"])
def test_what_is_no_json_object_is_refused_plainly_and_reserves_nothing(
    pair: tuple[Engine, Engine], leg: str, path: str, data: bytes
) -> None:
    engine = pair[0] if leg == "prefill" else pair[1]
    reply = httpx.post(f"{engine.url}{path}", content=data, headers={"x-headrace-leg": leg}, timeout=TIMEOUT)
    _assert_refused(reply, 400, reply.json()["error"]["code"])
    engine.wait_all_free()


def _assert_refused(reply: httpx.Response, status: int, code: str | None) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def _ticket(pair: tuple[Engine, Engine], prompt: list[int]) -> str:
    """A real ticket, whose decode leg has been closed again."""
    headers = {"x-headrace-leg": "decode"}
    with httpx.stream(
        "POST", f"{pair[1].url}/v1/completions", json=completion(prompt), headers=headers, timeout=TIMEOUT
    ) as response:
        return next(iter(Events(response)))[1]


def test_a_ticket_for_another_prompt_is_refused(pair: tuple[Engine, Engine]) -> None:
    reply = post_prefill(pair[0].url, completion([20, 21, 23]), _ticket(pair, [20, 21, 22]))
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "prompt_mismatch")


def test_a_ticket_is_good_for_one_push(pair: tuple[Engine, Engine]) -> None:
    body = completion([20, 21, 22])
    headers = {"x-headrace-leg": "decode"}
    url = f"{pair[1].url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT) as response:
        events = iter(Events(response))  # kept: the leg is closed with it
        ticket = next(events)[1]
        replies = [post_prefill(pair[0].url, body, ticket) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 409]
    assert replies[1].json()["error"]["code"] == "stale_ticket"


@pytest.mark.parametrize("leg", ["", "decode"])
def test_a_prefill_engine_takes_prefill_legs_only(pair: tuple[Engine, Engine], leg: str) -> None:
    headers = {"x-headrace-leg": leg} if leg else {}
    reply = httpx.post(f"{pair[0].url}/v1/completions", json=completion([20]), headers=headers, timeout=TIMEOUT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "wrong_role")


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0, "seed": 3, "top_p": 0.9, "frequency_penalty": 1.5, "logit_bias": {"40": 3}},
        {"temperature": 1.0, "seed": 3, "n": 3},
        {"logprobs": 2},
        {"echo": True, "min_tokens": 3, "stop_token_ids": [40]},
        {"structured_outputs": {"choice": ["to be", "not to be"]}, "ignore_eos": False, "max_tokens": 20},
    ],
    ids=["sampling", "choices", "logprobs", "echo", "grammar"],
)
def test_what_a_request_asks_of_its_answer_is_the_same_apart(
    unified: Engine, pair: tuple[Engine, Engine], asked: dict[str, Any]
) -> None:
    prefill, decode = pair
    body = completion(prompts_of([20], first=70)[0], **asked)
    together = httpx.post(f"{unified.url}/v1/completions", json=body, timeout=TIMEOUT).json()["choices"]
    apart = round_trip(prefill.url, decode.url, body)["choices"]
    for choices in (together, apart):  # the logits of both are not equal in their last bits
        logprobs = choices[0].pop("logprobs")
        assert (logprobs is not None) == ("logprobs" in asked)
        if logprobs:
            assert logprobs["token_logprobs"] == [max(top.values()) for top in logprobs["top_logprobs"]]
    assert apart == together
    if "structured_outputs" in asked:
        assert apart[0]["text"] in ("to be", "not to be")


def test_several_prompts_in_one_request_have_the_answers_of_a_unified_engine(
    unified: Engine, pair: tuple[Engine, Engine]
) -> None:
    prompts = [*prompts_of([20, 1, 2 * BLOCK, 130], first=60), *prompts_of([20], first=60)]
    body = completion(prompts, temperature=1.0, seed=3, n=2)
    together = httpx.post(f"{unified.url}/v1/completions", json=body, timeout=TIMEOUT).json()
    apart = round_trip(pair[0].url, pair[1].url, body)
    assert [choice["index"] for choice in apart["choices"]] == list(range(10))
    assert apart["choices"] == together["choices"]
    for usage in (apart["usage"], together["usage"]):
        usage.pop("prompt_tokens_details")
    assert apart["usage"] == together["usage"]
    for engine in pair:
        engine.wait_all_free()


def test_one_of_several_prompts_without_its_kv_fails_all_before_a_client_has_seen_anything(
    pair: tuple[Engine, Engine],
) -> None:
    body = completion(prompts_of([20, 4000], first=64), stream=True)
    url, headers = f"{pair[1].url}/v1/completions", {"x-headrace-leg": "decode"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT) as response:
        events = iter(Events(response))
        tickets = sorted((json.loads(data)["prompt_index"], data) for _, data in (next(events), next(events)))
        assert post_prefill(pair[0].url, body, tickets[0][1]).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            post_prefill(pair[0].url, body, tickets[1][1], timeout=httpx.Timeout(60, read=0.3))
        name, data = next(events)
    outcome = json.loads(data)
    assert (name, outcome["status"], outcome["retriable"]) == ("error", 503, True)
    for engine in pair:
        engine.wait_all_free()


def test_a_ticket_for_a_prompt_that_is_not_there_is_refused(pair: tuple[Engine, Engine]) -> None:
    ticket = json.loads(_ticket(pair, [20, 21, 22])) | {"prompt_index": 1}
    reply = post_prefill(pair[0].url, completion([20, 21, 22]), json.dumps(ticket))
    _assert_refused(reply, 400, None)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 0, "n": 2}])
def test_a_prompt_that_is_to_be_scored_is_computed_by_decode(
    unified: Engine, pair: tuple[Engine, Engine], asked: dict[str, Any]
) -> None:
    body, headers = completion(prompts_of([20], first=80)[0], **asked), {"x-headrace-leg": "decode"}
    together = httpx.post(f"{unified.url}/v1/completions", json=body, timeout=TIMEOUT).json()["choices"]
    with httpx.stream("POST", f"{pair[1].url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT) as response:
        (first, ticket), (last, outcome) = Events(response)
    assert (first, ticket, last) == ("ticket", "null", "response")
    assert rounded(json.loads(outcome)["body"]["choices"]) == rounded(together)
    pair[1].wait_all_free()


def rounded(answers: Any) -> Any:
    """Without the last bits of its numbers, which depend on how a prompt was cut into steps."""
    return json.loads(json.dumps(answers), parse_float=lambda number: round(float(number), 3))
