"""Push under arbitrary interleavings of writes, failures, cancellation and time: exactly one terminal notification."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.kv.tickets import make_ticket

from headrace_engine.kv.notices import Done, Failed
from headrace_engine.kv.push import MAX_OUTSTANDING_WRITES, Notify, Push, Write

BLOCK = 4
LEASE_SECONDS = 20.0
LOCAL_SLOT = 6


class PushMachine(RuleBasedStateMachine):
    @initialize(num_tokens=st.integers(1, 40), held_blocks=st.integers(0, 3), max_blocks_per_write=st.integers(1, 4))
    def accept(self, num_tokens: int, held_blocks: int, max_blocks_per_write: int) -> None:
        num_blocks = -(-(num_tokens - 1) // BLOCK)
        held_blocks = min(held_blocks, (num_tokens - 1) // BLOCK)
        self.ticket = make_ticket(
            num_tokens=num_tokens,
            block_size=BLOCK,
            num_held_tokens=held_blocks * BLOCK,
            block_ids=tuple(range(100, 100 + num_blocks)),
            lease_seconds=LEASE_SECONDS,
        )
        self.push = Push(self.ticket, BLOCK, max_blocks_per_write, accepted_at=0.0)
        self.max_blocks_per_write = max_blocks_per_write
        self.expected = {(index, 100 + index) for index in range(held_blocks, num_blocks)}
        self.num_given = 0
        self.now = 0.0
        self.lease_end = 0.0  # nothing is granted
        self.is_finished = self.is_notified = False
        self.outstanding: dict[int, Write] = {}
        self.ended_well: list[Write] = []
        self.any_write_failed = False
        self.terminals: list[Done | Failed] = []  # as decode would see them

    @rule(seconds_ago=st.sampled_from([0.0, 3.0, 15.0]))
    def decode_grants(self, seconds_ago: float) -> None:
        asked_at = max(0.0, self.now - seconds_ago)
        self.push.lease_granted(asked_at)
        self.lease_end = max(self.lease_end, asked_at + LEASE_SECONDS)

    @precondition(lambda self: not self.is_finished)
    @rule(num_blocks=st.integers(0, 4))
    def a_chunk_completes(self, num_blocks: int) -> None:
        end = min(self.num_given + num_blocks, len(self.ticket.block_ids))
        self.push.blocks_complete(self.num_given, list(range(self.num_given, end)))
        self.num_given = end

    @precondition(lambda self: not self.is_finished and self.num_given == len(self.ticket.block_ids))
    @rule()
    def prefill_ends(self) -> None:
        self.push.finish(LOCAL_SLOT, num_cached_tokens=0)
        self.is_finished = True

    @rule()
    def the_client_leaves(self) -> None:
        self.push.fail("cancelled")

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def act(self) -> None:
        while (action := self.push.next_action(self.now)) is not None:
            assert not self.is_notified, "an action after the terminal notification"
            if isinstance(action, Notify):
                assert not self.outstanding, "decode is told while bytes may still be written"
                self.terminals.append(action.completion)
                self.is_notified = True
                self.push.notified()
            else:
                self._start(action)

    def _start(self, write: Write) -> None:
        assert self.now < self.lease_end, "a write started without a lease"
        assert len(write.local_blocks) == len(write.remote_blocks) <= self.max_blocks_per_write
        assert (write.slots is None) == (write.completion is None)
        if write.completion is not None:
            assert not self.outstanding, "Done is behind the last write only, and others are still running"
        self.outstanding[write.write_id] = write
        assert len(self.outstanding) <= MAX_OUTSTANDING_WRITES

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data(), ends_well=st.sampled_from([True, True, True, False]))
    def a_write_ends(self, data: st.DataObject, ends_well: bool) -> None:
        write_id = data.draw(st.sampled_from(sorted(self.outstanding)))
        write = self.outstanding.pop(write_id)
        self.push.write_ended(write_id, None if ends_well else "broken")
        if ends_well:
            self.ended_well.append(write)
            if write.completion is not None:
                self.terminals.append(write.completion)  # it rode behind the data
        else:
            self.any_write_failed = True

    @invariant()
    def terminal_is_single_and_true(self) -> None:
        if not hasattr(self, "terminals"):
            return
        assert len(self.terminals) <= 1
        assert self.push.is_over == bool(self.terminals)
        if self.terminals and isinstance(self.terminals[0], Failed):
            assert self.terminals[0].is_settled == (not self.any_write_failed)
        if self.terminals and isinstance(self.terminals[0], Done):
            assert not self.any_write_failed
            assert self.push.error is None
            written = [
                pair for write in self.ended_well for pair in zip(write.local_blocks, write.remote_blocks, strict=True)
            ]
            assert sorted(written) == sorted(self.expected), "Done with blocks missing, doubled or held by decode"
            slots = [write.slots for write in self.ended_well if write.slots]
            assert slots == ([] if self.ticket.num_tokens == 1 else [(LOCAL_SLOT, self.ticket.state_slot)])

    def teardown(self) -> None:
        """However it stands, the push ends: outstanding writes end, time passes."""
        if not hasattr(self, "terminals"):
            return
        self.now += LEASE_SECONDS
        self.act()
        for write_id in sorted(self.outstanding):
            write = self.outstanding.pop(write_id)
            self.push.write_ended(write_id)
            if write.completion is not None:
                self.terminals.append(write.completion)
            else:
                self.ended_well.append(write)
        self.act()
        assert self.push.is_over
        assert len(self.terminals) == 1


TestPush = PushMachine.TestCase
TestPush.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
