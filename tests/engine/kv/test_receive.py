"""Receiver: every ticket has one outcome; who holds its lease may write and end it, and nobody else."""

from __future__ import annotations

import time

import pytest

from headrace_engine.kv.notices import Done, Failed, Renew, Renewed, decode_notice, encode_notice
from headrace_engine.kv.receive import Received, ReceiveEvent, ReceiveFailed, ReceiveLost, Receiver

LEASE, LANDING = 30.0, 15.0
A, B = "prefill-0/inc-a", "prefill-1/inc-b"


def make_receiver(num_tickets: int = 1, holder: str | None = A) -> Receiver:
    """Expects generations 1, 2, ... of requests r-1, r-2, ..., all taken by `holder`."""
    receiver = Receiver(now=0.0, lease_seconds=LEASE, landing_seconds=LANDING)
    for generation in range(1, num_tickets + 1):
        receiver.expect(generation, f"r-{generation}", now=0.0)
        if holder is not None:
            assert receiver.renew(holder, [generation], now=0.0) == ((generation,), ())
    return receiver


def run_until(receiver: Receiver, now: float, start: float = 0.0) -> list[ReceiveEvent]:
    """Ticks every half second, as a process that is not stalled does."""
    events: list[ReceiveEvent] = []
    for tick in range(1, round((now - start) * 2) + 1):
        events += receiver.expire(start + tick / 2)
    return events


def test_done_and_failed_are_outcomes_and_the_second_one_is_stale() -> None:
    receiver = make_receiver(2)
    assert receiver.complete(A, Done("r-1", 1, 48), 1.0) == Received(1, "r-1", 48)
    assert receiver.complete(A, Failed("r-2", 2, "no"), 1.0) == ReceiveFailed(2, "r-2", "no")
    assert receiver.complete(A, Done("r-1", 1, 48), 1.0) is None
    assert receiver.complete(A, Done("r-2", 2, 0), 1.0) is None
    assert (receiver.num_stale, receiver.num_open, receiver.num_wanted) == (2, 0, 0)


def test_notices_of_another_generation_request_or_program_change_nothing() -> None:
    receiver = make_receiver()
    for notice in (Done("r-1", 2, 0), Done("r-other", 1, 0), decode_notice(b"hello"), decode_notice(b"")):
        assert notice is None or isinstance(notice, Done)
        assert receiver.complete(A, notice, 1.0) is None
    assert (receiver.num_stale, receiver.num_open) == (4, 1)


def test_a_ticket_belongs_to_the_first_rank_that_asks() -> None:
    receiver = make_receiver()
    assert receiver.renew(B, [1], 1.0) == ((), (1,))
    assert receiver.renew(A, [1], 1.0) == ((1,), ())


@pytest.mark.parametrize("word", [Done("r-1", 1, 0), Failed("r-1", 1, "my ticket is a replayed one")])
def test_only_the_holder_can_end_a_ticket(word: Done | Failed) -> None:
    receiver = make_receiver(holder=A)
    assert receiver.complete(B, word, 1.0) is None  # A may be writing
    assert receiver.num_open == 1
    assert receiver.complete(A, word, 1.0) is not None


def test_a_rank_that_could_not_take_a_ticket_can_say_so() -> None:
    receiver = make_receiver(holder=None)
    assert receiver.complete(B, Failed("r-1", 1, "no room"), 1.0) == ReceiveFailed(1, "r-1", "no room")
    assert receiver.renew(B, [1], 2.0) == ((), (1,))


def test_a_lease_that_is_renewed_never_ends() -> None:
    receiver = make_receiver()
    for beat in range(1, 100):
        assert run_until(receiver, beat * 5.0, start=beat * 5.0 - 5.0) == []
        assert receiver.renew(A, [1], beat * 5.0) == ((1,), ())


def test_without_renewal_the_request_fails_after_a_lease_and_its_blocks_are_free_when_bytes_have_landed() -> None:
    receiver = make_receiver()
    error = "prefill has not renewed its lease for 30 s"
    assert run_until(receiver, 29.5) == []
    assert run_until(receiver, 30.0, start=29.5) == [ReceiveLost(1, "r-1", error)]
    assert receiver.renew(A, [1], 31.0) == ((), (1,)), "it came back too late"
    assert run_until(receiver, 44.5, start=30.0) == []
    assert run_until(receiver, 45.0, start=44.5) == [ReceiveFailed(1, "r-1", error)]


def test_a_late_done_of_the_holder_frees_the_blocks_of_a_lost_request() -> None:
    receiver = make_receiver()
    run_until(receiver, 31.0)
    assert receiver.complete(A, Done("r-1", 1, 0), 32.0) == Received(1, "r-1", 0)


def test_after_a_write_that_was_given_up_the_blocks_wait_for_bytes_under_way() -> None:
    receiver = make_receiver()
    run_until(receiver, 2.0)
    torn = Failed("r-1", 1, "the connection broke", is_settled=False)
    assert receiver.complete(A, torn, 2.0) == ReceiveLost(1, "r-1", "the connection broke")
    assert receiver.renew(A, [1], 3.0) == ((), (1,))
    assert run_until(receiver, 16.5, start=2.0) == []
    assert run_until(receiver, 17.0, start=16.5) == [ReceiveFailed(1, "r-1", "the connection broke")]


def test_an_abandoned_ticket_is_not_renewed_and_ends_when_its_holder_says_so() -> None:
    receiver = make_receiver()
    receiver.abandon(1)
    assert (receiver.num_wanted, receiver.num_open) == (0, 1)
    assert receiver.renew(A, [1], 5.0) == ((), (1,))
    assert receiver.complete(A, Failed("r-1", 1, "refused"), 6.0) == ReceiveFailed(1, "r-1", "refused")
    receiver.abandon(1)  # too late, and harmless


def test_an_abandoned_ticket_whose_holder_is_gone_ends_without_a_word_about_its_request() -> None:
    receiver = make_receiver()
    receiver.abandon(1)
    events = run_until(receiver, 45.0)
    assert events == [ReceiveFailed(1, "r-1", "the request has ended")]


def test_an_abandoned_ticket_that_nobody_took_ends_at_once() -> None:
    receiver = make_receiver(holder=None)
    receiver.abandon(1)
    assert receiver.renew(A, [1], 0.1) == ((), (1,))
    assert [event.generation for event in receiver.expire(0.1)] == [1]


def test_a_ticket_that_nobody_takes_fails_after_a_lease_and_is_free_at_once() -> None:
    receiver = make_receiver(holder=None)
    (failed,) = run_until(receiver, 30.0)
    assert isinstance(failed, ReceiveFailed)
    assert failed.error == "no prefill engine has taken the ticket within 30 s"


def test_renewing_the_first_ticket_does_not_keep_later_ones_alive() -> None:
    receiver = make_receiver(3)
    run_until(receiver, 20.0)
    receiver.renew(A, [1], 20.0)
    assert [event.generation for event in run_until(receiver, 30.0, start=20.0)] == [2, 3]


def test_deadlines_do_not_run_while_the_process_is_stalled() -> None:
    receiver = make_receiver()
    run_until(receiver, 5.0)
    assert receiver.expire(105.0) == []  # 100 s frozen: what a peer sent in time may only land now
    assert run_until(receiver, 129.5, start=105.0) == []
    assert [type(event) for event in run_until(receiver, 130.0, start=129.5)] == [ReceiveLost]


NOTICES = [
    Done("r-1", 1, 48),
    Failed("r-2", 2**40, "why", is_settled=False),
    Renew(b"\x00\xff", 12.5, (1, 2, 3)),
    Renewed(12.5, (1,), (2, 3)),
]


@pytest.mark.parametrize("notice", NOTICES)
def test_notices_survive_the_wire(notice: Done | Failed | Renew | Renewed) -> None:
    assert decode_notice(encode_notice(notice)) == notice


def test_the_oldest_age_is_that_of_an_open_ticket() -> None:
    receiver = make_receiver()
    receiver.expect(9, "r-9", now=5.0)
    assert receiver.oldest_age(7.0) == 7.0
    receiver.complete(A, Done("r-1", 1, 0), 7.0)
    assert receiver.oldest_age(7.0) == 2.0


def test_looking_for_deadlines_costs_nothing_while_none_is_due() -> None:
    def seconds(num_tickets: int) -> float:
        receiver = make_receiver(num_tickets)
        started = time.perf_counter()
        for tick in range(2000):
            receiver.expire(tick / 1000)
        return time.perf_counter() - started

    assert min(seconds(5000) for _ in range(3)) < 20 * min(seconds(1) for _ in range(3))
