"""What engines say, what that says of a role, and how hard the role is pressed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_operator.pressure import Wanted, pressed_decode, pressed_prefill
from headrace_operator.signals import MIN_OBSERVATIONS, Measured, Sample, measured, quantile, sample_of

BOUNDS = (0.1, 1.0, 10.0)
NOTHING = (0, 0, 0, 0)
RANK = {
    "live_requests": 5, "num_running": 3, "num_waiting_for_kv": 1, "num_queued_tokens": 700, "num_blocks": 100,
    "num_free_blocks": 40, "recent_prompt_tokens": 6000, "recent_prompt_seconds": 12.0,
}  # fmt: skip
STATE: dict[str, Any] = {
    "ready": True,
    "ranks": [RANK, {**RANK, "live_requests": 7}],
    "recent": {
        "window_seconds": 30, "bounds_seconds": list(BOUNDS), "ticket": [9, 0, 0, 0], "prompt": [0, 10, 0, 0],
        "inter_token": [90, 20, 0, 0],
    },
}  # fmt: skip
SAMPLE = Sample(
    time=9.0, num_ranks=2, num_requests=12, num_running=6, num_waiting_for_kv=2, num_queued_tokens=1400,
    num_blocks=200, num_free_blocks=80, window_seconds=30.0, num_prompt_tokens=12000, prompt_seconds=24.0,
    bounds=BOUNDS, ticket=(9, 0, 0, 0), prompt=(0, 10, 0, 0), inter_token=(90, 20, 0, 0),
)  # fmt: skip


def test_a_sample_adds_up_the_ranks_of_a_group() -> None:
    assert sample_of(STATE, now=9.0) == SAMPLE


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ready", False),
        ("ranks", []),
        ("ranks", "none"),
        ("ranks.1", {"rank": 1, "ready": True}),  # it has said Hello, but nothing yet of its load
        ("ranks.0.num_free_blocks", 1000),
        ("ranks.0.num_running", -9),
        ("ranks.0.recent_prompt_seconds", float("nan")),
        ("ranks.0.num_blocks", "many"),
        ("recent", None),
        ("recent.window_seconds", 0),
        ("recent.bounds_seconds", [1.0, 0.1, 10.0]),
        ("recent.bounds_seconds", []),
        ("recent.prompt", [1, 2, 3]),
        ("recent.prompt", [0, 10, 0, -1]),
        ("recent.inter_token", [float("inf"), 0, 0, 0]),
    ],
)
def test_what_is_no_sound_answer_of_a_serving_leader_is_no_sample(path: str, value: Any) -> None:
    state = copy.deepcopy(STATE)
    node: Any = state
    *parents, last = path.split(".")
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[int(last) if isinstance(node, list) else last] = value
    assert sample_of(state, now=9.0) is None


@pytest.mark.parametrize("state", [None, 7, "ok", [], {}])
def test_other_json_is_no_sample(state: Any) -> None:
    assert sample_of(state, now=9.0) is None


# --- a role ---


def test_a_role_is_what_its_groups_are_together() -> None:
    busier = replace(SAMPLE, num_requests=20, num_running=10, num_free_blocks=0, inter_token=(0, 0, 110, 0))
    both = measured([SAMPLE, busier])
    assert both is not None
    own = 16 / 20  # of those admitted 16 run and 4 wait for prefill
    assert both.waits_for_prefill == pytest.approx(1 - own)
    assert both.requests_per_rank == pytest.approx(own * 32 / 4)
    assert both.kv_use == pytest.approx(own * (400 - 80) / 400)
    assert both.busy == pytest.approx(48 / (30 * 4))
    assert both.backlog_seconds == pytest.approx(2800 / (24000 / 48) / 4)
    assert both.inter_token_seconds == pytest.approx(1 + 9 * (198 - 110) / 110)
    assert both.prompt_seconds == pytest.approx(0.1 + 0.9 * 0.9)


def test_few_observations_say_nothing_of_the_slowest_tenth() -> None:
    few = measured([replace(SAMPLE, prompt=(0, MIN_OBSERVATIONS - 1, 0, 0))])
    assert few is not None
    assert few.prompt_seconds is None
    assert few.ticket_seconds is None


@pytest.mark.parametrize(
    ("queued", "tokens", "seconds", "backlog"),
    [(0, 0, 0.0, 0.0), (0, 100, 1.0, 0.0), (100, 0, 0.0, None), (100, 100, 1.0, 0.5)],
)
def test_how_long_a_queue_takes_is_known_from_the_speed_of_late(
    queued: int, tokens: int, seconds: float, backlog: float | None
) -> None:
    sample = replace(SAMPLE, num_queued_tokens=queued, num_prompt_tokens=tokens, prompt_seconds=seconds)
    role = measured([sample])
    assert role is not None
    assert role.backlog_seconds == backlog


def test_no_group_and_groups_that_count_differently_are_no_role() -> None:
    assert measured([]) is None
    assert measured([SAMPLE, replace(SAMPLE, bounds=(0.1, 1.0, 20.0))]) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.0001, 9.9), min_size=1, max_size=60), st.floats(0.05, 1))
def test_a_quantile_is_in_the_bucket_of_the_observation_that_it_stands_for(values: list[float], share: float) -> None:
    counts = [sum(low < value <= high for value in values) for low, high in zip((0, *BOUNDS), BOUNDS, strict=False)]
    found = quantile([*counts, 0], BOUNDS, share)
    exact = sorted(values)[max(0, -(-int(share * len(values) * 1e6) // int(1e6)) - 1)]
    bucket = next(index for index, bound in enumerate(BOUNDS) if exact <= bound)
    assert (0, *BOUNDS)[bucket] - 1e-9 <= found <= BOUNDS[bucket] + 1e-9


def test_of_what_is_longer_than_all_bounds_only_that_is_known() -> None:
    assert quantile((0, 0, 0, 5), BOUNDS, 0.9) == 10.0


# --- pressure ---

WANTED = Wanted(first_token_seconds=2.0, inter_token_seconds=0.05, kv_use=0.8, requests_per_rank=64)
CALM = Measured(
    requests_per_rank=16, kv_use=0.2, waits_for_prefill=0.1, busy=0.45, backlog_seconds=0.5, window_seconds=30,
    ticket_seconds=0.1, prompt_seconds=1.0, inter_token_seconds=0.02,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "pressure", "what"),
    [
        ({}, 0.5, "9 of 10 prompts take up to 1 s (target 2)"),
        ({"prompt_seconds": 3.0}, 1.5, "9 of 10 prompts take up to 3 s (target 2)"),
        ({"backlog_seconds": 4.0}, 2.0, "4 s of prompts are queued (target 2)"),
        ({"prompt_seconds": None, "backlog_seconds": 0.0}, 0.0, "0 s of prompts are queued (target 2)"),
        ({"ticket_seconds": 5.0, "waits_for_prefill": 0.9}, 2.5, "9 of 10 requests wait up to 5 s for others' prompts"),
        ({"ticket_seconds": 5.0, "waits_for_prefill": 0.4}, 0.5, "prompts take up to 1 s"),
        ({"inter_token_seconds": 9.0, "kv_use": 1.0}, 0.5, "prompts take up to 1 s"),  # decode's
    ],
)
def test_prefill_is_pressed_by_prompts(changes: dict[str, Any], pressure: float, what: str) -> None:
    role = replace(CALM, **changes)
    known = pressed_prefill(role, role, WANTED)
    assert known is not None
    assert known.pressure == pytest.approx(pressure)
    assert what in str(known)


@pytest.mark.parametrize(
    ("changes", "pressure", "what"),
    [
        ({}, 0.4, "9 of 10 tokens take up to 0.02 s (target 0.05)"),
        ({"inter_token_seconds": 0.1}, 2.0, "9 of 10 tokens take up to 0.1 s (target 0.05)"),
        ({"kv_use": 1.0}, 1.25, "1 of the KV blocks in use (target 0.8)"),
        ({"requests_per_rank": 96.0}, 1.5, "96 requests a rank (target 64)"),
        ({"ticket_seconds": 5.0}, 2.5, "9 of 10 requests wait up to 5 s for cache space (target 2)"),
        ({"ticket_seconds": 5.0, "waits_for_prefill": 0.9}, 0.4, "tokens take"),  # prefill's fault
        ({"prompt_seconds": 9.0, "backlog_seconds": 9.0}, 0.4, "tokens take"),
    ],
)
def test_decode_is_pressed_by_answers(changes: dict[str, Any], pressure: float, what: str) -> None:
    known = pressed_decode(replace(CALM, **changes), WANTED)
    assert known is not None
    assert known.pressure == pytest.approx(pressure)
    assert what in str(known)


@pytest.mark.parametrize(
    ("changes", "prefill", "decode"),
    [
        ({}, (0.45 + 0.5 / 30) / 0.9, 0.25),
        ({"busy": 1.0, "backlog_seconds": 30.0}, 2 / 0.9, 0.25),  # twice the work that it can do
        ({"kv_use": 0.6}, (0.45 + 0.5 / 30) / 0.9, 0.75),
        ({"prompt_seconds": 99.0, "inter_token_seconds": 99.0}, (0.45 + 0.5 / 30) / 0.9, 0.25),  # times are no load
    ],
)
def test_loads_are_proportional_to_the_work(changes: dict[str, Any], prefill: float, decode: float) -> None:
    role = replace(CALM, **changes)
    first, second = pressed_prefill(role, role, WANTED), pressed_decode(role, WANTED)
    assert first is not None
    assert second is not None
    assert (first.load, second.load) == (pytest.approx(prefill), pytest.approx(decode))


def test_fewer_decode_groups_have_more_than_their_share() -> None:
    first, second = pressed_prefill(CALM, CALM, WANTED), pressed_decode(CALM, WANTED)
    assert first is not None
    assert second is not None
    assert first.load_with(4, 2) == pytest.approx(2 * first.load)
    assert second.load_with(4, 2) == pytest.approx(4 * second.load)


def test_prompts_that_nobody_computes_are_nothing_known() -> None:
    stuck = replace(CALM, backlog_seconds=None, prompt_seconds=None)
    assert pressed_prefill(stuck, stuck, WANTED) is None
