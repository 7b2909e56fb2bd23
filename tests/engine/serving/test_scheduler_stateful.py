"""The scheduler under arbitrary interleavings: every request ends, and every block and slot is accounted for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.engine.serving.test_scheduler import make, request, shape

from headrace_engine.core import Leg
from headrace_engine.scheduler import Scheduler
from headrace_engine.sequence import CancelPush, Generated, IssueTicket, PushEnd, StepOutput


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, steps and notifications."""

    def __init__(self) -> None:
        super().__init__()
        self.decode = make(num_blocks=9, max_batch_tokens=6, max_sequences=4, snapshots=False, max_model_len=36)
        self.prefill = make(num_blocks=9, max_batch_tokens=6, max_sequences=4, snapshots=True, max_model_len=36)
        self.now = 0.0
        self.count = 0
        self.last_generation = 0
        self.tickets: list[int] = []
        self.pushing: list[str] = []

    @rule(leg=st.sampled_from(list(Leg)), length=st.integers(1, 30), max_tokens=st.integers(1, 30))
    def arrive(self, leg: Leg, length: int, max_tokens: int) -> None:
        self.count += 1
        target = self.decode if leg is Leg.DECODE else self.prefill
        target.add(request(str(self.count), length, leg, max_tokens, first=self.count % 3), self.now)

    @rule(length=st.integers(1, 30), max_tokens=st.integers(1, 30), num_answers=st.integers(2, 3))
    def arrive_for_several_answers(self, length: int, max_tokens: int, num_answers: int) -> None:
        first, leader = self.count % 3, str(self.count + 1)
        for number in range(num_answers):
            self.count += 1
            asked = request(str(self.count), length, Leg.DECODE, max_tokens, first=first)
            asked.shares_kv_of = leader if number else None
            self.decode.add(asked, self.now)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = str(data.draw(st.integers(0, self.count)))
        self.decode.abort(name)
        self.prefill.abort(name)

    @rule(seconds=st.sampled_from([0.0, 0.1, 3.0, 40.0]))
    def step(self, seconds: float) -> None:
        self.now += seconds
        for scheduler in (self.decode, self.prefill):
            self.run(scheduler)

    def run(self, scheduler: Scheduler) -> None:
        step = scheduler.schedule(self.now)
        assert sum(row.num_tokens for row in step.rows) <= scheduler.limits.max_batch_tokens
        assert all(row.num_tokens > 0 for row in step.rows)
        assert len({row.sequence for row in step.rows}) == len(step.rows)
        for row in step.rows:
            last = row.sequence.num_computed + row.num_tokens
            assert len(row.sequence.block_ids) * scheduler.pool.block_size >= last
            assert row.sequence.state_slot >= 0
        slots = [row.sequence.state_slot for row in step.rows]
        assert len(set(slots)) == len(slots)
        scheduler.commit(step, StepOutput([7] * sum(row.samples for row in step.rows)))
        for action in scheduler.take_actions():
            if isinstance(action, IssueTicket):
                self.last_generation += 1
                scheduler.ticket_issued(action.sequence, self.last_generation)
                self.tickets.append(self.last_generation)
            elif isinstance(action, PushEnd | CancelPush):
                self.pushing.append(action.request_id)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), is_good=st.booleans())
    def notify(self, data: st.DataObject, is_good: bool) -> None:
        generation = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        if is_good:
            self.decode.kv_arrived(generation, 0)
        else:
            self.decode.kv_failed(generation, "no")

    @precondition(lambda self: self.pushing)
    @rule(data=st.data())
    def finish_push(self, data: st.DataObject) -> None:
        self.prefill.push_ended(self.pushing.pop(data.draw(st.integers(0, len(self.pushing) - 1))))

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.decode.pool.check_integrity()
        self.prefill.pool.check_integrity()

    def teardown(self) -> None:
        """From any state everything ends in a bounded number of steps, and every block is free again."""
        for _ in range(3000):
            while self.tickets:
                self.decode.kv_arrived(self.tickets.pop(), 0)
            while self.pushing:
                self.prefill.push_ended(self.pushing.pop())
            if self.decode.is_empty and self.prefill.is_empty:
                break
            self.now += 0.001
            self.run(self.decode)
            self.run(self.prefill)
        assert self.decode.is_empty
        assert self.prefill.is_empty
        for scheduler in (self.decode, self.prefill):
            scheduler.pool.check_integrity()
            assert scheduler.pool.num_free_blocks == 9
            assert scheduler.pool.num_quarantined_blocks == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    max_batch_tokens=st.integers(1, 24),
    snapshots=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_request_generates_exactly_its_tokens(
    lengths: list[tuple[int, int]], max_batch_tokens: int, snapshots: bool
) -> None:
    scheduler = make(num_blocks=8, max_batch_tokens=max_batch_tokens, snapshots=snapshots, max_model_len=32)
    for i, (length, max_tokens) in enumerate(lengths):
        scheduler.add(request(str(i), length, max_tokens=max_tokens), 0)
    counts = dict.fromkeys(map(str, range(len(lengths))), 0)
    for _ in range(5000):
        if scheduler.is_empty:
            break
        shape(scheduler)
        for action in scheduler.take_actions():
            assert isinstance(action, Generated)
            counts[action.request_id] += 1
    assert counts == {str(i): max_tokens for i, (_, max_tokens) in enumerate(lengths)}
