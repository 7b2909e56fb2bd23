"""The scheduler as a state machine: who computes what in a step, who waits, who gives way, and that nothing leaks."""

from __future__ import annotations

import pytest

from headrace_engine.core import EngineRequest, FinishReason, Leg, SamplingParams
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.scheduler import Scheduler, SchedulerLimits
from headrace_engine.sequence import (
    CancelPush,
    Generated,
    IssueTicket,
    PushBlocks,
    PushEnd,
    Refused,
    RevokeTicket,
    StepOutput,
)

EOS = 99


def make(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_batch_tokens: int = 64,
    max_mixed_tokens: int = 64,
    max_sequences: int = 8,
    max_waiting: int = 8,
    snapshots: bool = True,
    max_model_len: int = 64,
) -> Scheduler:
    limits = SchedulerLimits(
        max_batch_tokens, max_mixed_tokens, max_sequences, max_waiting, max_model_len, frozenset({EOS})
    )
    num_slots = max_sequences * (2 if snapshots else 1)
    pool = BlockPool(num_blocks, num_slots, block_size, needs_snapshots=snapshots)
    return Scheduler(limits, pool, has_snapshots=snapshots)


def request(name: str, num_tokens: int, leg: Leg = Leg.WHOLE, max_tokens: int = 4, first: int = 1) -> EngineRequest:
    tokens = [(first + i) % 90 for i in range(num_tokens)]
    return EngineRequest(name, leg, tokens, SamplingParams(max_tokens))


def issue(scheduler: Scheduler, generation: int) -> IssueTicket:
    """Do what the last action asks for."""
    action = scheduler.take_actions()[-1]
    assert isinstance(action, IssueTicket)
    scheduler.ticket_issued(action.sequence, generation)
    return action


def shape(scheduler: Scheduler, now: float = 0.0, token: int = 7) -> list[tuple[str, int, bool]]:
    """Run one step that samples `token` everywhere; returns its rows."""
    step = scheduler.schedule(now)
    scheduler.commit(step, StepOutput([token] * sum(row.samples for row in step.rows)))
    return [(row.sequence.request_id, row.num_tokens, row.samples) for row in step.rows]


def test_prompts_are_cut_at_the_last_block_boundary_and_then_finished() -> None:
    scheduler = make()
    scheduler.add(request("a", 10), 0)
    assert shape(scheduler) == [("a", 8, False)]
    assert shape(scheduler) == [("a", 2, True)]
    assert shape(scheduler) == [("a", 1, True)]


def test_generating_sequences_come_before_prompts_and_the_budget_is_kept() -> None:
    scheduler = make(max_batch_tokens=3, snapshots=False)
    scheduler.add(request("a", 2), 0)
    scheduler.add(request("b", 5), 0)
    assert shape(scheduler) == [("a", 2, True), ("b", 1, False)]
    assert shape(scheduler) == [("a", 1, True), ("b", 2, False)]
    assert shape(scheduler) == [("a", 1, True), ("b", 2, True)]


def test_while_others_generate_prompts_come_in_small_pieces() -> None:
    scheduler = make(max_batch_tokens=16, max_mixed_tokens=2, snapshots=False)
    scheduler.add(request("long", 20, max_tokens=1), 0)
    assert shape(scheduler) == [("long", 16, False)], "nobody waits"
    assert not scheduler.generates
    scheduler.add(request("a", 2, max_tokens=3), 0)
    assert shape(scheduler) == [("long", 4, True), ("a", 2, True)]
    assert scheduler.generates
    scheduler.add(request("next", 9, max_tokens=1), 0)
    assert shape(scheduler) == [("a", 1, True), ("next", 2, False)]
    assert shape(scheduler) == [("a", 1, True), ("next", 2, False)]
    assert shape(scheduler) == [("next", 5, True)]


def test_another_ranks_answers_keep_the_pieces_small_too() -> None:
    scheduler = make(max_batch_tokens=16, max_mixed_tokens=2, snapshots=False)
    scheduler.add(request("long", 20), 0)
    assert [row.num_tokens for row in scheduler.schedule(0, others_generate=True).rows] == [2]


def test_queued_tokens_are_those_of_prompts_that_are_still_to_be_computed_here() -> None:
    scheduler = make(max_batch_tokens=5, max_sequences=1)
    assert scheduler.num_queued_tokens == 0
    scheduler.add(request("a", 10), 0)
    scheduler.add(request("b", 6, first=40), 0)
    scheduler.add(request("d", 12, Leg.DECODE), 0)  # which prefill computes
    assert scheduler.num_queued_tokens == 10 + 6
    shape(scheduler)
    assert scheduler.num_queued_tokens == 5 + 6
    while scheduler.num_waiting > 1 or scheduler.num_running:
        shape(scheduler)
    assert scheduler.num_queued_tokens == 0


def test_a_step_knows_how_many_of_its_tokens_are_of_prompts() -> None:
    scheduler = make(snapshots=False)
    scheduler.add(request("a", 3), 0)
    shape(scheduler)
    scheduler.add(request("b", 5), 0)
    assert scheduler.schedule(0).num_prompt_tokens == 5, "and one of a generates"


def test_a_cached_prefix_is_no_work_for_the_queue() -> None:
    scheduler = make(max_sequences=1)
    scheduler.add(request("a", 10, max_tokens=1), 0)
    while not scheduler.is_empty:
        shape(scheduler)
    scheduler.add(request("b", 10, Leg.PREFILL), 0)
    scheduler.add(request("c", 10), 0)
    assert scheduler.num_queued_tokens == (10 - 1 - 8) + (10 - 8)


def test_a_second_request_reuses_the_blocks_and_a_copy_of_the_state() -> None:
    scheduler = make()
    scheduler.add(request("a", 10, max_tokens=1), 0)
    while not scheduler.is_empty:
        shape(scheduler)
    scheduler.take_actions()
    scheduler.add(request("b", 10), 0)
    step = scheduler.schedule(0)
    assert [row.num_tokens for row in step.rows] == [2]
    assert len(step.slot_copies) == 1
    scheduler.commit(step, StepOutput([7]))
    assert scheduler.take_actions() == [Generated("b", 7, None, 8)]


@pytest.mark.parametrize(
    ("token", "max_tokens", "ignore_eos", "stop_token_ids", "expected"),
    [
        (EOS, 4, False, (), FinishReason.STOP),
        (EOS, 4, True, (), None),
        (5, 1, False, (), FinishReason.LENGTH),
        (5, 2, False, (), None),
        (5, 2, False, (4,), None),
        (5, 2, False, (4, 5), FinishReason.STOP),
        (5, 1, True, (5,), FinishReason.STOP),
    ],
)
def test_generation_ends_at_eos_a_stop_token_or_max_tokens(
    token: int, max_tokens: int, ignore_eos: bool, stop_token_ids: tuple[int, ...], expected: FinishReason | None
) -> None:
    scheduler = make()
    wanted = SamplingParams(max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
    scheduler.add(EngineRequest("a", Leg.WHOLE, [1, 2], wanted), 0)
    shape(scheduler, token=token)
    assert scheduler.take_actions() == [Generated("a", token, expected, 0)]


def test_generation_ends_where_the_context_ends() -> None:
    scheduler = make(max_model_len=4)
    scheduler.add(request("a", 3, max_tokens=9), 0)
    shape(scheduler)
    assert scheduler.take_actions() == [Generated("a", 7, FinishReason.LENGTH, 0)]


def test_the_sequence_admitted_last_gives_way_and_resumes_with_its_tokens() -> None:
    scheduler = make(num_blocks=4, snapshots=False)
    scheduler.add(request("a", 7, max_tokens=6), 0)
    scheduler.add(request("b", 7, max_tokens=6), 0)
    shape(scheduler)
    shape(scheduler)  # token 8 of both fills their second block
    assert shape(scheduler) == [("a", 1, True)]
    assert scheduler.num_preemptions == 1
    seen: list[tuple[str, int, bool]] = []
    while not scheduler.is_empty:
        seen += shape(scheduler)
    assert ("b", 9, True) in seen, "b recomputes its prompt and what it had generated"
    ends = [a for a in scheduler.take_actions() if isinstance(a, Generated) and a.finish_reason]
    assert [a.request_id for a in ends] == ["a", "b"]


@pytest.mark.parametrize(("leg", "status"), [(Leg.WHOLE, 429), (Leg.DECODE, 503), (Leg.PREFILL, 503)])
def test_the_queue_is_bounded_and_the_refusal_is_retriable(leg: Leg, status: int) -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(request("a", 3, leg), 0)
    scheduler.add(request("b", 3, leg), 0)
    (refused,) = scheduler.take_actions()
    assert isinstance(refused, Refused)
    assert (refused.error.status, refused.error.retriable) == (status, True)


def test_no_one_overtakes_the_head_of_the_queue() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(request("a", 9, max_tokens=3), 0)
    scheduler.add(request("big", 8), 0)
    scheduler.add(request("small", 2), 0)
    assert {name for name, _, _ in shape(scheduler)} == {"a"}
    assert scheduler.num_waiting == 2


class TestDecodeLeg:
    def test_reserves_the_whole_prompt_then_waits_then_runs_its_last_token(self) -> None:
        scheduler = make(snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE), 0)
        assert shape(scheduler) == []
        action = issue(scheduler, 5)
        assert len(action.sequence.block_ids) == 3
        assert action.num_held_tokens == 0
        scheduler.kv_arrived(5, num_cached_tokens=4)
        assert shape(scheduler) == [("d", 1, True)]
        assert scheduler.take_actions() == [Generated("d", 7, None, 4)]

    def test_tells_prefill_which_leading_tokens_it_holds(self) -> None:
        scheduler = make(snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE, max_tokens=1), 0)
        shape(scheduler)
        issue(scheduler, 1)
        scheduler.kv_arrived(1, 0)
        shape(scheduler)
        scheduler.add(request("e", 11, Leg.DECODE), 0)
        shape(scheduler)
        assert issue(scheduler, 2).num_held_tokens == 8

    def test_cancelled_while_waiting_its_blocks_are_quarantined_until_prefill_is_done(self) -> None:
        scheduler = make(num_blocks=3, snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE), 0)
        shape(scheduler)
        issue(scheduler, 1)
        scheduler.abort("d")
        assert scheduler.take_actions() == [RevokeTicket(1)]
        assert (scheduler.pool.num_free_blocks, scheduler.pool.num_quarantined_blocks) == (0, 3)
        scheduler.kv_failed(1, "cancelled")
        assert (scheduler.pool.num_free_blocks, scheduler.pool.num_quarantined_blocks) == (3, 0)
        assert scheduler.take_actions() == []

    def test_blocks_it_held_before_are_never_quarantined(self) -> None:
        scheduler = make(num_blocks=4, snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE, max_tokens=1), 0)
        shape(scheduler)
        issue(scheduler, 1)
        scheduler.kv_arrived(1, 0)
        shape(scheduler)
        scheduler.add(request("e", 11, Leg.DECODE), 0)
        shape(scheduler)
        issue(scheduler, 2)
        scheduler.abort("e")
        assert scheduler.pool.num_quarantined_blocks == 1

    def test_is_refused_when_no_kv_comes(self) -> None:
        scheduler = make(num_blocks=3, snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE), 0)
        shape(scheduler)
        issue(scheduler, 1)
        scheduler.kv_failed(1, "the lease is over")
        (refused,) = scheduler.take_actions()
        assert isinstance(refused, Refused)
        assert (refused.error.status, refused.error.retriable) == (503, True)
        assert scheduler.pool.num_free_blocks == 3

    def test_is_refused_when_no_block_becomes_free_in_time(self) -> None:
        scheduler = make(num_blocks=3, snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE), 0)
        scheduler.add(request("e", 9, Leg.DECODE), 0)
        shape(scheduler, now=0)
        issue(scheduler, 1)
        shape(scheduler, now=scheduler.limits.reserve_seconds - 0.1)
        assert scheduler.take_actions() == []
        shape(scheduler, now=scheduler.limits.reserve_seconds)
        (refused,) = scheduler.take_actions()
        assert isinstance(refused, Refused)
        assert (refused.request_id, refused.error.status, refused.error.retriable) == ("e", 503, True)

    def test_only_those_that_are_late_are_looked_at(self) -> None:
        scheduler = make(num_blocks=3, snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE), 0)
        shape(scheduler)
        issue(scheduler, 1)
        for arrival in range(4):
            scheduler.add(request(f"e{arrival}", 9, Leg.DECODE), arrival)
        shape(scheduler, now=1 + scheduler.limits.reserve_seconds)
        assert [a.request_id for a in scheduler.take_actions() if isinstance(a, Refused)] == ["e0", "e1"]
        assert scheduler.num_waiting == 2

    def test_a_completion_of_another_generation_changes_nothing(self) -> None:
        scheduler = make(snapshots=False)
        scheduler.add(request("d", 9, Leg.DECODE), 0)
        shape(scheduler)
        issue(scheduler, 1)
        scheduler.kv_arrived(77, 0)
        assert shape(scheduler) == []
        assert scheduler.num_waiting_for_kv == 1

    def test_preempted_it_recomputes_everything_itself(self) -> None:
        scheduler = make(num_blocks=4, snapshots=False)
        for generation, name in enumerate("de"):
            scheduler.add(request(name, 8, Leg.DECODE, max_tokens=3, first=ord(name)), 0)
            shape(scheduler)
            issue(scheduler, generation)
        scheduler.kv_arrived(0, 0)
        scheduler.kv_arrived(1, 0)
        seen: list[tuple[str, int, bool]] = []
        while not scheduler.is_empty:
            seen += shape(scheduler)
        assert ("e", 9, True) in seen
        assert not [a for a in scheduler.take_actions() if isinstance(a, IssueTicket)]


class TestPrefillLeg:
    def test_computes_all_but_the_last_token_and_pushes_as_blocks_become_final(self) -> None:
        scheduler = make(max_batch_tokens=5)
        scheduler.add(request("p", 11, Leg.PREFILL), 0)
        assert shape(scheduler) == [("p", 5, False)]
        (first,) = scheduler.take_actions()
        assert isinstance(first, PushBlocks)
        assert (first.first, len(first.block_ids)) == (0, 1)
        assert shape(scheduler) == [("p", 3, False)]
        assert shape(scheduler) == [("p", 2, False)]
        *pushes, end = scheduler.take_actions()
        assert [(p.first, len(p.block_ids)) for p in pushes if isinstance(p, PushBlocks)] == [(1, 1), (2, 1)]
        assert isinstance(end, PushEnd)
        assert shape(scheduler) == []
        assert scheduler.num_pushing == 1
        scheduler.push_ended("p")
        assert scheduler.is_empty

    def test_a_prompt_of_one_token_ships_only_the_completion(self) -> None:
        scheduler = make()
        scheduler.add(request("p", 1, Leg.PREFILL), 0)
        assert shape(scheduler) == []
        (end,) = scheduler.take_actions()
        assert isinstance(end, PushEnd)

    def test_a_cached_prefix_is_pushed_at_once(self) -> None:
        scheduler = make()
        for name in ("p", "q"):
            scheduler.add(request(name, 11, Leg.PREFILL), 0)
            while scheduler.num_running or scheduler.num_waiting:
                shape(scheduler)
            actions = scheduler.take_actions()
            scheduler.push_ended(name)
        assert isinstance(actions[0], PushBlocks)
        assert len(actions[0].block_ids) == 2
        assert isinstance(actions[-1], PushEnd)
        assert actions[-1].num_cached_tokens == 8

    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_cancelled_it_keeps_its_blocks_until_the_transfer_has_ended(self, steps: int) -> None:
        scheduler = make(max_batch_tokens=5)
        scheduler.add(request("p", 11, Leg.PREFILL), 0)
        for _ in range(steps):
            shape(scheduler)
        free = scheduler.pool.num_free_blocks
        scheduler.abort("p")
        scheduler.abort("p")
        assert [a for a in scheduler.take_actions() if isinstance(a, CancelPush)] == [
            CancelPush("p", "the request was cancelled")
        ]
        assert scheduler.pool.num_free_blocks == free
        assert shape(scheduler) == []
        scheduler.push_ended("p")
        assert scheduler.pool.num_free_blocks == 16

    def test_a_transfer_that_fails_in_the_middle_ends_the_computation(self) -> None:
        scheduler = make(max_batch_tokens=5)
        scheduler.add(request("p", 11, Leg.PREFILL), 0)
        shape(scheduler)
        scheduler.push_ended("p")
        assert shape(scheduler) == []
        assert scheduler.pool.num_free_blocks == 16
