"""One accepted ticket's push: which write may start when, and when decode is told how it ended. Pure.

    open ──lease granted, blocks complete──> writes ──finish──> the last write, with Done behind it ──> over
      └── cancel, lease past, a write or the peer failed ──> outstanding writes end ──> Failed ──> over

Invariants: no write starts before decode has granted the lease, or after it (see `lease`); the last write starts only
when all others have ended well; the one terminal notification follows every write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_engine.core import Ticket
from headrace_engine.kv.notices import Completion, Done, Failed

PushKey = tuple[str, int]  # incarnation, generation: generations alone collide between decode ranks

MAX_OUTSTANDING_WRITES = 4  # per push: enough to keep the transport busy, few enough to stay fair and cancellable


@dataclass(frozen=True)
class Write:
    """Start this write: local items to the ticket's items, then `completion` if there is one."""

    write_id: int
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    slots: tuple[int, int] | None = None  # local, remote
    completion: Done | None = None


@dataclass(frozen=True)
class Notify:
    """Send this terminal notification by itself; no write is outstanding."""

    completion: Completion


@dataclass
class _Outstanding:
    is_last: bool
    started_at: float


@dataclass
class Push:
    """Times are of one monotonic clock of this process."""

    ticket: Ticket
    block_size: int
    max_blocks_per_write: int
    accepted_at: float
    error: str | None = None  # set once: the push will end with Failed
    is_over: bool = False
    _granted_until: float | None = None
    _is_torn: bool = False  # a write did not end well: its bytes may be under way
    _next_block: int = 0  # sequence blocks before it are complete
    _pending: list[tuple[int, int]] = field(default_factory=list)  # (local, remote) blocks that may be written
    _finish: tuple[int, Done] | None = None  # local slot
    _last_started: bool = False
    _outstanding: dict[int, _Outstanding] = field(default_factory=dict)
    _num_writes: int = 0
    _is_notifying: bool = False

    @property
    def key(self) -> PushKey:
        return (self.ticket.incarnation, self.ticket.generation)

    @property
    def has_lease(self) -> bool:
        """Whether decode has granted it, be it past by now."""
        return self._granted_until is not None

    @property
    def lease_end(self) -> float:
        """No write may start at or after this time; before the first grant: how long it is waited for."""
        return self.accepted_at + self.ticket.lease_seconds if self._granted_until is None else self._granted_until

    def oldest_write_age(self, now: float) -> float:
        """Seconds since the oldest write that has not ended was started; 0 without one."""
        return max((now - write.started_at for write in self._outstanding.values()), default=0.0)

    def lease_granted(self, asked_at: float) -> None:
        """Decode has granted what was asked for then. Grants may come in any order, and twice."""
        until = asked_at + self.ticket.lease_seconds
        self._granted_until = until if self._granted_until is None else max(self._granted_until, until)

    def blocks_complete(self, first_block: int, local_blocks: Sequence[int]) -> None:
        """Sequence blocks from `first_block` on are complete in these local blocks; in order, without gaps.

        Blocks that decode holds already are skipped. Raises ValueError on a gap, a repetition or too many blocks.
        """
        if first_block != self._next_block or self._finish is not None:
            raise ValueError(f"block {self._next_block} comes next, not {first_block}")
        end = first_block + len(local_blocks)
        if end > len(self.ticket.block_ids):
            raise ValueError(f"the ticket has {len(self.ticket.block_ids)} blocks, not {end}")
        num_skipped = max(0, self.ticket.num_held_tokens // self.block_size - first_block)
        remote_blocks = self.ticket.block_ids[first_block + num_skipped : end]
        self._pending.extend(zip(local_blocks[num_skipped:], remote_blocks, strict=True))
        self._next_block = end

    def finish(self, local_slot: int, num_cached_tokens: int) -> None:
        """All blocks are complete and the slot holds the state of all tokens but the last."""
        if self._next_block != len(self.ticket.block_ids) or self._finish is not None:
            raise ValueError(f"{self._next_block} of {len(self.ticket.block_ids)} blocks are complete")
        self._finish = (local_slot, Done(self.ticket.request_id, self.ticket.generation, num_cached_tokens))

    def fail(self, error: str) -> None:
        """Start no more writes; end with Failed once the outstanding ones have ended. The first error stays.

        Too late once the last write is under way: its outcome is the push's.
        """
        if self.error is None and not self.is_over and not self._last_started and not self._is_notifying:
            self.error = error

    def next_action(self, now: float) -> Write | Notify | None:
        """What may be done now; call again until None. The caller reports each outcome back."""
        if self.is_over or self._is_notifying:
            return None
        if now >= self.lease_end and not self._last_started:
            verb = "granted" if self._granted_until is None else "renewed"
            self.fail(f"decode has not {verb} the lease for {self.ticket.lease_seconds:g} s")
        if self.error is not None:
            return self._notify(
                Failed(self.ticket.request_id, self.ticket.generation, self.error, is_settled=not self._is_torn)
            )
        if self._granted_until is None or self._last_started or len(self._outstanding) >= MAX_OUTSTANDING_WRITES:
            return None
        if self._finish is not None and len(self._pending) <= self.max_blocks_per_write:
            return self._last(now)
        if self._pending:
            return self._write(now, None, None)
        return None

    def write_ended(self, write_id: int, error: str | None = None) -> None:
        """A write has ended, well or not, or was given up with its connection."""
        write = self._outstanding.pop(write_id)
        if write.is_last:
            self._last_started = False
            self.is_over = error is None
        if error is not None:
            self._is_torn = True
            self.fail(error)

    def notified(self, error: str | None = None) -> None:
        """The notification is on its way, or cannot be sent: either way there is no more to do."""
        self._is_notifying = False
        if error is not None and self.error is None:
            self.error = error
        self.is_over = True

    def _last(self, now: float) -> Write | Notify | None:
        assert self._finish is not None
        local_slot, done = self._finish
        if self._outstanding:
            return None
        if self.ticket.num_tokens == 1:
            return self._notify(done)  # one token has no state before it
        return self._write(now, (local_slot, self.ticket.state_slot), done)

    def _write(self, now: float, slots: tuple[int, int] | None, done: Done | None) -> Write:
        pairs = self._pending[: self.max_blocks_per_write]
        del self._pending[: self.max_blocks_per_write]
        self._num_writes += 1
        self._last_started = done is not None
        self._outstanding[self._num_writes] = _Outstanding(is_last=done is not None, started_at=now)
        local_blocks, remote_blocks = zip(*pairs, strict=True) if pairs else ((), ())
        return Write(self._num_writes, local_blocks, remote_blocks, slots, done)

    def _notify(self, completion: Completion) -> Notify | None:
        if self._outstanding:
            return None
        self._is_notifying = True
        return Notify(completion)
