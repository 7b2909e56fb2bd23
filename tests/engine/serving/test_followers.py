"""Several answers of one request with prefill and decode apart: one ticket, whose KV serves all of them."""

from __future__ import annotations

import pytest
from tests.engine.serving.test_scheduler import issue, make, request, shape

from headrace_engine.core import EngineRequest, Leg, SamplingParams
from headrace_engine.scheduler import Scheduler
from headrace_engine.sequence import Refused


def ask(scheduler: Scheduler, num_tokens: int, names: str = "abc", max_tokens: int = 4) -> None:
    """A leg for each name; the first one leads the others."""
    leader, *followers = names
    for name in names:
        scheduler.add(answer(name, num_tokens, leader if name in followers else None, max_tokens), 0)


def answer(name: str, num_tokens: int, leader: str | None, max_tokens: int = 4) -> EngineRequest:
    asked = request(name, num_tokens, Leg.DECODE, max_tokens)
    asked.shares_kv_of = leader
    return asked


def decode(**sizes: int) -> Scheduler:
    return make(snapshots=False, **sizes)


def is_all_free(scheduler: Scheduler) -> bool:
    pool = scheduler.pool
    pool.check_integrity()
    return scheduler.is_empty and pool.num_free_blocks == pool.num_blocks and pool.num_quarantined_blocks == 0


@pytest.mark.parametrize(("num_tokens", "num_shared", "is_copied"), [(10, 2, True), (9, 2, False), (8, 1, True)])
def test_full_blocks_are_shared_and_the_rest_of_the_state_is_copied(
    num_tokens: int, num_shared: int, is_copied: bool
) -> None:
    scheduler = decode()
    ask(scheduler, num_tokens)
    assert shape(scheduler) == []
    leader = issue(scheduler, 1).sequence
    assert (scheduler.num_waiting_for_kv, scheduler.num_waiting) == (3, 0)
    scheduler.kv_arrived(1, num_cached_tokens=4)
    step = scheduler.schedule(0)
    assert [(row.sequence.request_id, row.num_tokens, row.samples) for row in step.rows] == [
        (name, 1, True) for name in "abc"
    ]
    followers = [row.sequence for row in step.rows[1:]]
    assert step.slot_copies == [(leader.state_slot, follower.state_slot) for follower in followers]
    copied = [(leader.block_ids[-1], follower.block_ids[-1]) for follower in followers]
    assert step.block_copies == (copied if is_copied else [])
    for follower in followers:
        assert follower.block_ids[:num_shared] == leader.block_ids[:num_shared]
        assert len({leader.state_slot, *(each.state_slot for each in followers)}) == 3
        assert (follower.num_computed, follower.num_cached_tokens) == (num_tokens - 1, 4)
    assert len({leader.block_ids[-1], *(each.block_ids[-1] for each in followers)}) == 3


def test_all_answers_are_written_and_everything_is_free_again() -> None:
    scheduler = decode()
    ask(scheduler, 10)
    shape(scheduler)
    issue(scheduler, 1)
    scheduler.kv_arrived(1, 0)
    while not scheduler.is_empty:
        shape(scheduler)
    assert scheduler.prompt_tokens_total == 10, "a prompt counts once"
    assert is_all_free(scheduler)


def test_a_leader_is_admitted_when_there_is_room_for_all() -> None:
    scheduler = decode(max_sequences=3)
    scheduler.add(request("x", 3, Leg.DECODE), 0)
    ask(scheduler, 10)
    shape(scheduler)
    assert issue(scheduler, 1).sequence.request_id == "x"
    assert shape(scheduler) == []
    assert scheduler.take_actions() == []
    scheduler.abort("x")
    scheduler.kv_failed(1, "over")
    shape(scheduler)
    assert issue(scheduler, 2).sequence.request_id == "a"


@pytest.mark.parametrize("sizes", [{"max_sequences": 2}, {"num_blocks": 4}], ids=["sequences", "blocks"])
def test_those_without_room_compute_the_prompt_here_when_there_is_some(sizes: dict[str, int]) -> None:
    scheduler = decode(**sizes)
    ask(scheduler, 10, max_tokens=2)
    shape(scheduler)
    issue(scheduler, 1)
    scheduler.kv_arrived(1, 0)
    assert shape(scheduler) == [("a", 1, True), ("b", 1, True)]
    rows = []
    while not scheduler.is_empty:
        rows += shape(scheduler)
    assert ("c", 10, True) in rows
    assert is_all_free(scheduler)


def test_one_that_comes_when_the_leader_runs_computes_the_prompt_here() -> None:
    scheduler = decode()
    ask(scheduler, 10, "ab")
    shape(scheduler)
    issue(scheduler, 1)
    scheduler.add(answer("c", 10, "a"), 0)
    assert scheduler.num_waiting_for_kv == 3
    scheduler.kv_arrived(1, 0)
    scheduler.add(answer("d", 10, "a"), 0)
    assert shape(scheduler) == [("a", 1, True), ("b", 1, True), ("c", 1, True), ("d", 10, True)]


def test_prompts_that_are_to_be_scored_are_computed_here_by_each_answer() -> None:
    scheduler = decode()
    for name in "ab":
        asked = answer(name, 10, None if name == "a" else "a")
        asked.sampling = SamplingParams(4, num_prompt_logprobs=0)
        scheduler.add(asked, 0)
    assert scheduler.num_queued_tokens == 20
    assert shape(scheduler) == [("a", 10, True), ("b", 10, True)]
    assert scheduler.num_waiting_for_kv == 0


@pytest.mark.parametrize("is_admitted", [False, True])
def test_when_no_kv_comes_all_are_refused(is_admitted: bool) -> None:
    scheduler = decode()
    ask(scheduler, 10)
    if is_admitted:
        shape(scheduler)
        issue(scheduler, 1)
        scheduler.kv_failed(1, "no")
        names = ["a", "b", "c"]
    else:
        scheduler.abort("a")
        names = ["b", "c"]
    refused = [action for action in scheduler.take_actions() if isinstance(action, Refused)]
    assert [each.request_id for each in refused] == names
    assert all(each.error.retriable for each in refused)
    assert scheduler.num_waiting_for_kv == 0
    assert is_all_free(scheduler)


def test_answers_may_be_given_up_one_by_one() -> None:
    scheduler = decode()
    ask(scheduler, 10)
    scheduler.abort("b")
    shape(scheduler)
    issue(scheduler, 1)
    assert scheduler.num_waiting_for_kv == 2
    scheduler.abort("c")
    assert scheduler.num_waiting_for_kv == 1
    scheduler.kv_arrived(1, 0)
    assert shape(scheduler) == [("a", 1, True)]
