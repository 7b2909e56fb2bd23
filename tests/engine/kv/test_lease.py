"""Leases: what prefill asks and when; and that no write ever meets a new owner of its blocks, whatever messages do.

The second part puts `Push` and `Heartbeats` of two prefill ranks and the `Receiver` of a decode rank on a network that
loses, delays, doubles and reorders everything between them, and lets each stand still at any time.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.kv.tickets import make_ticket

from headrace_engine.kv.lease import Heartbeats
from headrace_engine.kv.notices import MAX_GENERATIONS, Completion, Renew, Renewed
from headrace_engine.kv.push import Notify, Push, Write
from headrace_engine.kv.receive import Received, ReceiveFailed, ReceiveLost, Receiver

LEASE, TIMEOUT, SLACK = 6.0, 3.0, 1.0
NUM_BLOCKS = 5


def test_a_new_lease_is_asked_for_at_once_and_then_with_its_peers_others() -> None:
    heartbeats = Heartbeats()
    heartbeats.add("d-0", 1, 30.0, now=0.0)
    assert heartbeats.due(0.0) == [("d-0", (1,))]
    heartbeats.add("d-0", 2, 30.0, now=3.0)
    heartbeats.add("d-1", 1, 30.0, now=3.0)
    assert heartbeats.due(3.0) == [("d-0", (2,)), ("d-1", (1,))]
    assert heartbeats.due(4.9) == []
    assert heartbeats.due(5.0) == [("d-0", (1, 2))]
    assert heartbeats.due(8.0) == [("d-1", (1,))]


def test_what_has_ended_is_not_asked_for() -> None:
    heartbeats = Heartbeats()
    heartbeats.add("d-0", 1, 30.0, now=0.0)
    heartbeats.add("d-0", 2, 30.0, now=0.0)
    heartbeats.remove("d-0", 1)
    assert heartbeats.due(0.0) == [("d-0", (2,))]
    heartbeats.remove("d-0", 2)
    heartbeats.remove("d-0", 2)  # again, and of a stranger: nothing happens
    heartbeats.remove("d-9", 1)
    assert heartbeats.due(1000.0) == []


def test_the_shortest_lease_of_a_peer_sets_its_beat() -> None:
    heartbeats = Heartbeats()
    heartbeats.add("d-0", 1, 60.0, now=0.0)
    heartbeats.add("d-0", 2, 6.0, now=0.0)
    heartbeats.due(0.0)
    assert heartbeats.due(1.0) == [("d-0", (1, 2))]


def test_messages_are_of_bounded_size() -> None:
    heartbeats = Heartbeats()
    for generation in range(2 * MAX_GENERATIONS + 1):
        heartbeats.add("d-0", generation, 30.0, now=0.0)
    assert [len(generations) for _, generations in heartbeats.due(0.0)] == [MAX_GENERATIONS, MAX_GENERATIONS, 1]


class _Prefill:
    """One prefill rank with the ticket; its writes last as long as the machine likes, at most the time-out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.push = Push(
            make_ticket(4 * NUM_BLOCKS + 1, 4, lease_seconds=LEASE), block_size=4, max_blocks_per_write=1, accepted_at=0
        )
        self.heartbeats = Heartbeats()
        self.heartbeats.add("decode", 1, LEASE, now=0.0)
        self.writes: dict[int, tuple[Write, float]] = {}  # running: started at
        self.num_given = 0


class LeaseMachine(RuleBasedStateMachine):
    @initialize()
    def issue(self) -> None:
        self.now = 0.0
        self.receiver = Receiver(0.0, LEASE, TIMEOUT + SLACK)
        self.receiver.expect(1, "r-1", 0.0)
        self.ranks = [_Prefill("p-0/a"), _Prefill("p-1/b")]  # the second one has a replay of the ticket
        self.mail: list[tuple[str, str, Any]] = []  # (from, to, notice), in any order
        self.outcomes: list[Received | ReceiveFailed] = []
        self.lost: list[ReceiveLost] = []
        self.is_abandoned = False
        self.looked_at = 0.0  # when decode ran last

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.0, 2.9, 7.0]))
    def time_passes(self, seconds: float) -> None:
        """Decode runs often enough to know that it does; prefill need not."""
        for rank in self.ranks:  # a write that is too old is given up: that is the other side of the bargain
            for write_id, (_, started) in list(rank.writes.items()):
                if self.now + seconds - started > TIMEOUT:
                    del rank.writes[write_id]
                    rank.push.write_ended(write_id, "took too long")
        end = self.now + seconds
        while self.now + 0.5 < end:
            self.now += 0.5
            self.decode_looks()
        self.now = end

    @rule()
    def decode_looks(self) -> None:
        self._take(self.receiver.expire(self.now))

    @rule()
    def decode_abandons(self) -> None:
        self.is_abandoned = True
        self.receiver.abandon(1)

    @rule(index=st.integers(0, 1))
    def prefill_computes(self, index: int) -> None:
        rank = self.ranks[index]
        if rank.num_given < NUM_BLOCKS:
            rank.push.blocks_complete(rank.num_given, [rank.num_given])
            rank.num_given += 1
            if rank.num_given == NUM_BLOCKS:
                rank.push.finish(0, 0)

    @rule(index=st.integers(0, 1))
    def prefill_is_cancelled(self, index: int) -> None:
        self.ranks[index].push.fail("cancelled")

    @rule(index=st.sampled_from([0, 0, 1]))
    def prefill_looks(self, index: int) -> None:
        rank = self.ranks[index]
        if rank.push.is_over:
            rank.heartbeats.remove("decode", 1)
        for _, generations in rank.heartbeats.due(self.now):
            self.mail.append((rank.name, "decode", Renew(b"", self.now, generations)))
        while (action := rank.push.next_action(self.now)) is not None:
            if isinstance(action, Notify):
                self.mail.append((rank.name, "decode", action.completion))
                rank.push.notified()
            else:
                assert not self.outcomes, "a write starts into blocks that have a new owner"
                rank.writes[action.write_id] = (action, self.now)

    @precondition(lambda self: any(rank.writes for rank in self.ranks))
    @rule(data=st.data(), ends_well=st.sampled_from([True, True, True, False]))
    def a_write_ends(self, data: st.DataObject, ends_well: bool) -> None:
        rank = next(rank for rank in self.ranks if rank.writes)
        write_id = data.draw(st.sampled_from(sorted(rank.writes)))
        write, _ = rank.writes.pop(write_id)
        rank.push.write_ended(write_id, None if ends_well else "broken")
        if ends_well and write.completion is not None:
            self.mail.append((rank.name, "decode", write.completion))

    @precondition(lambda self: self.mail)
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "arrives", "is lost", "arrives twice"]))
    def a_message(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.mail) - 1))
        sender, to, notice = self.mail[index]
        if fate != "arrives twice":
            del self.mail[index]
        if fate == "is lost":
            return
        if to == "decode":
            self._decode_takes(sender, notice)
        else:
            self._prefill_takes(next(rank for rank in self.ranks if rank.name == to), notice)

    def _decode_takes(self, sender: str, notice: Renew | Completion) -> None:
        if isinstance(notice, Renew):
            granted, refused = self.receiver.renew(sender, notice.generations, self.now)
            assert not (granted and (self.outcomes or self.lost or self.is_abandoned))
            self.mail.append(("decode", sender, Renewed(notice.sent_at, granted, refused)))
        elif (event := self.receiver.complete(sender, notice, self.now)) is not None:
            self._take([event])

    def _prefill_takes(self, rank: _Prefill, answer: Renewed) -> None:
        if answer.granted:
            rank.push.lease_granted(answer.sent_at)
        if answer.refused:
            rank.push.fail("refused")

    def _take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, ReceiveLost):
                self.lost.append(event)
            else:
                self.outcomes.append(event)

    @invariant()
    def blocks_have_one_owner(self) -> None:
        if not hasattr(self, "outcomes"):
            return
        assert len(self.outcomes) <= 1
        assert len(self.lost) <= 1
        if self.outcomes:
            assert not any(rank.writes for rank in self.ranks), "bytes may land in blocks that have a new owner"
        if self.outcomes and isinstance(self.outcomes[0], Received):
            assert any(rank.push.is_over and rank.push.error is None for rank in self.ranks)

    def teardown(self) -> None:
        """Whatever was lost: decode has its outcome and each push its end, with no message more."""
        if not hasattr(self, "outcomes"):
            return
        self.mail.clear()
        for _ in range(4):
            self.time_passes(7.0)
            for index in range(2):
                self.prefill_looks(index)
        assert len(self.outcomes) == 1
        assert all(rank.push.is_over for rank in self.ranks)


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


class _Bytes:
    """When the last byte of any rank's writes lands, if each write takes as long as it may."""

    def __init__(self) -> None:
        self.land_until = 0.0
        self.outcome_at: float | None = None

    def write(self, now: float, seconds: float) -> None:
        assert self.outcome_at is None or self.outcome_at > now, "a write starts into blocks that have a new owner"
        self.land_until = max(self.land_until, now + seconds)


@given(
    renew_delay=st.floats(0.0, 8.0),
    answer_delay=st.floats(0.0, 8.0),
    cut_at=st.floats(0.5, 20.0),
    write_from=st.floats(0.0, 25.0),
)
@example(renew_delay=0.0, answer_delay=0.0, cut_at=0.5, write_from=5.9)
@example(renew_delay=0.0, answer_delay=0.0, cut_at=0.7, write_from=8.8)
def test_the_latest_write_that_a_lease_allows_has_landed_before_the_blocks_are_free(
    renew_delay: float, answer_delay: float, cut_at: float, write_from: float
) -> None:
    """The network is cut for ever; prefill starts a write as late as it likes, and it takes as long as it may."""
    rank, receiver, landing = _Prefill("p-0/a"), Receiver(0.0, LEASE, TIMEOUT + SLACK), _Bytes()
    receiver.expect(1, "r-1", 0.0)
    rank.push.blocks_complete(0, [0])
    mail: list[tuple[float, Renew | Renewed]] = []
    for tick in range(500):
        now = tick / 10
        for arrival, notice in [] if now >= cut_at else list(mail):
            if arrival <= now:
                mail.remove((arrival, notice))
                if isinstance(notice, Renew):
                    granted, refused = receiver.renew(rank.name, notice.generations, now)
                    mail.append((now + answer_delay, Renewed(notice.sent_at, granted, refused)))
                elif notice.granted:
                    rank.push.lease_granted(notice.sent_at)
        mail += [(now + renew_delay, Renew(b"", now, asked)) for _, asked in rank.heartbeats.due(now)]
        for event in receiver.expire(now):
            if isinstance(event, ReceiveFailed):
                landing.outcome_at = now
        if now >= write_from and isinstance(rank.push.next_action(now), Write):
            landing.write(now, TIMEOUT)
    assert landing.outcome_at is not None
    assert landing.outcome_at >= landing.land_until


@pytest.mark.parametrize("word", ["refused", "cancelled"])
def test_a_replay_of_a_ticket_cannot_free_blocks_that_its_holder_writes_into(word: str) -> None:
    holder, replay = _Prefill("p-0/a"), _Prefill("p-1/b")
    receiver = Receiver(0.0, LEASE, TIMEOUT + SLACK)
    receiver.expect(1, "r-1", 0.0)
    assert receiver.renew(holder.name, (1,), 0.0) == ((1,), ())
    assert receiver.renew(replay.name, (1,), 0.1) == ((), (1,))
    replay.push.fail(word)
    notify = replay.push.next_action(0.2)
    assert isinstance(notify, Notify)
    assert receiver.complete(replay.name, notify.completion, 0.3) is None
    assert receiver.num_open == 1


def test_bytes_of_a_write_that_was_given_up_have_landed_before_the_blocks_are_free() -> None:
    rank, receiver = _Prefill("p-0/a"), Receiver(0.0, LEASE, TIMEOUT + SLACK)
    receiver.expect(1, "r-1", 0.0)
    receiver.renew(rank.name, (1,), 0.0)
    rank.push.lease_granted(0.0)
    rank.push.blocks_complete(0, [0])
    write = rank.push.next_action(0.1)
    assert isinstance(write, Write)
    rank.push.write_ended(write.write_id, "the connection broke")  # what it sent may be in a socket's buffer
    notify = rank.push.next_action(0.2)
    assert isinstance(notify, Notify)
    assert isinstance(receiver.complete(rank.name, notify.completion, 0.2), ReceiveLost)
    free_at = next(tick / 10 for tick in range(3, 200) if receiver.expire(tick / 10))
    assert free_at >= 0.2 + SLACK


@pytest.mark.parametrize("delay", [0.0, 0.4, 1.5, 2.0])
def test_a_lease_lives_for_ever_on_a_network_whose_delays_are_short_of_it(delay: float) -> None:
    """Each message takes `delay` seconds, and every third is lost."""
    rank, receiver = _Prefill("p-0/a"), Receiver(0.0, LEASE, TIMEOUT)
    receiver.expect(1, "r-1", 0.0)
    mail: list[tuple[float, Renew | Renewed]] = []
    num_sent = 0
    for tick in range(2000):
        now = tick / 10
        for arrival, notice in list(mail):
            if arrival <= now:
                mail.remove((arrival, notice))
                if isinstance(notice, Renew):
                    granted, refused = receiver.renew(rank.name, notice.generations, now)
                    assert (granted, refused) == ((1,), ())
                    mail.append((now + delay, Renewed(notice.sent_at, granted, refused)))
                else:
                    rank.push.lease_granted(notice.sent_at)
        assert receiver.expire(now) == []
        for _, generations in rank.heartbeats.due(now):
            num_sent += 1
            if num_sent % 3:
                mail.append((now + delay, Renew(b"", now, generations)))
        assert rank.push.next_action(now) is None
    assert rank.push.error is None
    assert rank.push.has_lease
