"""Receiver: every ticket has one outcome, stale notifications have none."""

from __future__ import annotations

from headrace_engine.kv.receive import Received, ReceiveFailed, Receiver
from headrace_engine.kv.ticket import Done, Failed, decode_completion, encode_completion


def make_receiver(*deadlines: float) -> Receiver:
    """Expects generations 1, 2, ... of requests r-1, r-2, ..."""
    receiver = Receiver(now=0.0)
    for generation, deadline in enumerate(deadlines, start=1):
        receiver.expect(generation, f"r-{generation}", now=0.0, deadline=deadline)
    return receiver


def run_until(receiver: Receiver, now: float, start: float = 0.0) -> list[ReceiveFailed]:
    """Ticks every half second, as a process that is not stalled does."""
    failed = []
    ticks = round((now - start) * 2)
    for tick in range(1, ticks + 1):
        failed += receiver.expire(start + tick / 2)
    return failed


def test_done_and_failed_are_outcomes_and_the_second_one_is_stale() -> None:
    receiver = make_receiver(60.0, 60.0)
    assert receiver.complete(Done("r-1", 1, 48)) == Received(1, "r-1", 48)
    assert receiver.complete(Failed("r-2", 2, "no")) == ReceiveFailed(2, "r-2", "no")
    assert receiver.complete(Done("r-1", 1, 48)) is None
    assert receiver.complete(Done("r-2", 2, 0)) is None
    assert (receiver.num_stale, receiver.num_open) == (2, 0)


def test_notifications_of_another_generation_request_or_program_change_nothing() -> None:
    receiver = make_receiver(60.0)
    for message in (Done("r-1", 2, 0), Done("r-other", 1, 0), decode_completion(b"hello"), decode_completion(b"")):
        assert receiver.complete(message) is None
    assert (receiver.num_stale, receiver.num_open) == (4, 1)


def test_an_abandoned_ticket_keeps_its_outcome_but_nobody_waits_for_it() -> None:
    receiver = make_receiver(60.0)
    receiver.abandon(1)
    assert (receiver.num_wanted, receiver.num_open) == (0, 1)
    assert receiver.complete(Done("r-1", 1, 0)) == Received(1, "r-1", 0)
    receiver.abandon(1)  # too late, and harmless


def test_a_ticket_without_word_fails_at_its_deadline_whatever_came_before_it() -> None:
    receiver = make_receiver(30.0, 10.0, 20.0)
    assert [failed.generation for failed in run_until(receiver, 20.0)] == [2, 3]
    assert receiver.num_open == 1
    assert [failed.request_id for failed in run_until(receiver, 30.0, start=20.0)] == ["r-1"]


def test_deadlines_do_not_run_while_the_process_is_stalled() -> None:
    receiver = make_receiver(10.0)
    run_until(receiver, 5.0)
    assert receiver.expire(105.0) == []  # 100 s frozen: what a peer sent in time may only land now
    assert run_until(receiver, 109.5, start=105.0) == []
    assert len(run_until(receiver, 110.0, start=109.5)) == 1


def test_completions_survive_the_wire() -> None:
    for completion in (Done("r-1", 1, 48), Failed("r-2", 2**40, "why")):
        assert decode_completion(encode_completion(completion)) == completion


def test_the_oldest_age_is_that_of_an_open_ticket() -> None:
    receiver = make_receiver(60.0)
    receiver.expect(9, "r-9", now=5.0, deadline=60.0)
    assert receiver.oldest_age(7.0) == 7.0
    receiver.complete(Done("r-1", 1, 0))
    assert receiver.oldest_age(7.0) == 2.0
