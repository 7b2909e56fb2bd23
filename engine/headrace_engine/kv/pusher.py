"""Carries pushes out: drives each `Push` over the transport, and keeps their leases alive at the decode ranks.

Everything here runs in the transfer agent's thread. `Transport` is what it needs of `nixl.NixlTransport`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_engine.core import Ticket
from headrace_engine.kv.connections import Connections, Connector
from headrace_engine.kv.events import PushDone, PushFailed, TransferStats
from headrace_engine.kv.lease import Heartbeats
from headrace_engine.kv.nixl import TransportError, WriteHandle, WriteState
from headrace_engine.kv.notices import Renew, Renewed, encode_notice
from headrace_engine.kv.push import Notify, Push, PushKey, Write


class Transport(Connector, Protocol):
    """See `nixl.NixlTransport`, whose methods these are."""

    def write(
        self,
        peer_name: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        slots: tuple[int, int] | None,
        notification: bytes,
    ) -> WriteHandle: ...

    def poll(self, handle: WriteHandle) -> WriteState: ...

    def give_up(self, handle: WriteHandle) -> None: ...

    def notify(self, peer_name: str, message: bytes) -> None: ...


@dataclass
class _Transfer:
    push: Push
    handles: dict[int, WriteHandle] = field(default_factory=dict)  # by write id
    num_bytes: int = 0
    first_write_at: float | None = None

    @property
    def peer_name(self) -> str:
        return self.push.ticket.peer.agent_name


class Pusher:
    """All open pushes of this rank.

    metadata: how decode ranks reach this one. write_timeout_seconds: a write that takes longer is given up, by ending
    the connection to its peer: a running write cannot be taken back in any other way.

    Most pushes wait (for their turn to be computed) most of the time: only *active* ones, to which something has
    happened, are looked at in a step.
    """

    def __init__(
        self,
        transport: Transport,
        connections: Connections,
        metadata: bytes,
        *,
        block_size: int,
        block_bytes: int,
        slot_bytes: int,
        max_write_bytes: int,
        write_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._connections = connections
        self._metadata = metadata
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._slot_bytes = slot_bytes
        self._max_blocks_per_write = max(1, max_write_bytes // max(1, block_bytes))
        self._write_timeout_seconds = write_timeout_seconds
        self._clock = clock
        self._heartbeats = Heartbeats()
        self._transfers: dict[PushKey, _Transfer] = {}  # in order of acceptance
        self._active: dict[PushKey, _Transfer] = {}
        self._keys_by_peer: dict[str, set[PushKey]] = {}
        self._without_lease: set[PushKey] = set()
        self._next_lease_end = math.inf  # no lease of an inactive push ends before
        self.last_notified_at: float | None = None
        self.has_more = False
        self.is_writing = False

    @property
    def is_idle(self) -> bool:
        return not self._transfers

    @property
    def awaits_lease(self) -> bool:
        """Whether some push cannot write yet because decode's answer has not come."""
        return bool(self._without_lease)

    @property
    def peer_names(self) -> KeysView[str]:
        """Decode ranks with open pushes."""
        return self._keys_by_peer.keys()

    def oldest_age(self, now: float) -> float:
        return now - next(iter(self._transfers.values())).push.accepted_at if self._transfers else 0.0

    def open(self, ticket: Ticket, accepted_at: float) -> None:
        """Begin a push whose ticket has been checked. A peer that cannot be reached fails it at the next step."""
        push = Push(ticket, self._block_size, self._max_blocks_per_write, accepted_at)
        try:
            self._connections.use(ticket.peer, self.peer_names)
            self._heartbeats.add(ticket.peer.agent_name, ticket.generation, ticket.lease_seconds, self._clock())
            self._without_lease.add(push.key)
        except TransportError as error:
            push.fail(str(error))
        self._transfers[push.key] = self._active[push.key] = _Transfer(push)
        self._keys_by_peer.setdefault(ticket.peer.agent_name, set()).add(push.key)
        self._next_lease_end = min(self._next_lease_end, push.lease_end)

    def blocks_complete(self, key: PushKey, first_block: int, local_blocks: Sequence[int]) -> None:
        if (push := self._touch(key)) is not None:  # else it has ended, and its event is on the way
            push.blocks_complete(first_block, local_blocks)

    def finish(self, key: PushKey, local_slot: int, num_cached_tokens: int) -> None:
        if (push := self._touch(key)) is not None:
            push.finish(local_slot, num_cached_tokens)

    def cancel(self, key: PushKey, reason: str) -> None:
        if (push := self._touch(key)) is not None:
            push.fail(reason)

    def cancel_all(self, reason: str) -> None:
        for key in self._transfers:
            self.cancel(key, reason)

    def renewed(self, sender: str, answer: Renewed) -> None:
        """Decode's answer to a request for leases. What does not fit an open push to this sender is stale."""
        if not answer.sent_at <= self._clock():  # a time that we never sent; also: not a number
            return
        incarnation = sender.rpartition("/")[2]
        for generation in answer.granted:
            if (push := self._touch((incarnation, generation), sender)) is not None:
                push.lease_granted(answer.sent_at)
                self._without_lease.discard(push.key)
        for generation in answer.refused:
            if (push := self._touch((incarnation, generation), sender)) is not None:
                push.fail("decode wants this ticket's KV no more, or has it from another prefill rank")

    def end_old_writes(self) -> None:
        """Give up writes that have run too long. Before anything else lets the transport move their bytes."""
        now = self._clock()
        for transfer in list(self._active.values()):
            if transfer.push.oldest_write_age(now) > self._write_timeout_seconds:
                self._lose_peer(transfer.peer_name, f"a write took longer than {self._write_timeout_seconds:g} s")

    def step(self) -> list[PushDone | PushFailed]:
        """Look after every active push once; returns those that have ended.

        Each does one thing a step, so that a long push (a write over shared memory copies before it returns) keeps
        neither the others nor incoming notices waiting. `has_more` says to come back at once.
        """
        self.has_more = False
        self._wake_expired()
        for transfer in list(self._active.values()):
            self._look_at_writes(transfer)
        self._renew()
        over: list[_Transfer] = []
        for key, transfer in list(self._active.items()):
            action = transfer.push.next_action(self._clock())  # a write may have to start before a lease ends
            if isinstance(action, Write):
                self._write(transfer, action)
            elif isinstance(action, Notify):
                self._notify(transfer, action)
            self.has_more |= action is not None
            if transfer.push.is_over:
                over.append(transfer)
                self._close(transfer)
            elif action is None and not transfer.handles:
                self._active.pop(key, None)
        self.is_writing = any(transfer.handles for transfer in self._active.values())
        return [_outcome(transfer, self._clock()) for transfer in over]

    def add_to(self, stats: TransferStats) -> None:
        stats.num_pushing = len(self._transfers)
        stats.num_without_lease = len(self._without_lease)

    def _touch(self, key: PushKey, peer_name: str | None = None) -> Push | None:
        """The open push of this key (to that peer), which is looked at in the next step."""
        transfer = self._transfers.get(key)
        if transfer is None or peer_name not in (None, transfer.peer_name):
            return None
        self._active[key] = transfer
        return transfer.push

    def _close(self, transfer: _Transfer) -> None:
        push = transfer.push
        self._transfers.pop(push.key)
        self._active.pop(push.key, None)
        self._without_lease.discard(push.key)
        self._heartbeats.remove(transfer.peer_name, push.ticket.generation)
        keys = self._keys_by_peer[transfer.peer_name]
        keys.discard(push.key)
        if not keys:
            del self._keys_by_peer[transfer.peer_name]

    def _wake_expired(self) -> None:
        """Make pushes active whose lease has ended."""
        now = self._clock()
        if now < self._next_lease_end:
            return
        for key, transfer in self._transfers.items():
            if now >= transfer.push.lease_end:
                self._active[key] = transfer
        ends = (transfer.push.lease_end for transfer in self._transfers.values())
        self._next_lease_end = min((end for end in ends if end > now), default=math.inf)

    def _renew(self) -> None:
        now = self._clock()
        for peer_name, generations in self._heartbeats.due(now):
            try:
                self._transport.notify(peer_name, encode_notice(Renew(self._metadata, now, generations)))
            except TransportError as error:
                self._lose_peer(peer_name, f"the connection to decode broke: {error}")

    def _look_at_writes(self, transfer: _Transfer) -> None:
        for write_id, handle in list(transfer.handles.items()):
            state = self._transport.poll(handle)
            if state is WriteState.RUNNING:
                continue
            transfer.handles.pop(write_id, None)
            transfer.push.write_ended(write_id, None if state is WriteState.DONE else "a write failed")
            if state is WriteState.FAILED:
                self._lose_peer(transfer.peer_name, "the connection to decode broke")
                return

    def _write(self, transfer: _Transfer, write: Write) -> None:
        now = self._clock()
        notification = encode_notice(write.completion) if write.completion else b""
        try:
            handle = self._transport.write(
                transfer.peer_name, write.local_blocks, write.remote_blocks, write.slots, notification
            )
        except TransportError as error:
            transfer.push.write_ended(write.write_id, str(error))
            self._lose_peer(transfer.peer_name, str(error))
            return
        transfer.handles[write.write_id] = handle
        transfer.num_bytes += len(write.local_blocks) * self._block_bytes
        transfer.num_bytes += self._slot_bytes if write.slots else 0
        if transfer.first_write_at is None:
            transfer.first_write_at = now
        self._look_at_writes(transfer)  # small and local writes end at once

    def _notify(self, transfer: _Transfer, notify: Notify) -> None:
        """Tell decode, over a new connection if a failed write has cost the old one: it must not wait for the lease."""
        self.last_notified_at = self._clock()
        try:
            self._connections.use(transfer.push.ticket.peer, self.peer_names)
            self._transport.notify(transfer.peer_name, encode_notice(notify.completion))
            transfer.push.notified()
        except TransportError as error:
            transfer.push.notified(str(error))

    def _lose_peer(self, name: str, error: str) -> None:
        """End the connection; every write to this peer is given up then, and every push to it fails."""
        self._connections.drop(name)
        for key in self._keys_by_peer.get(name, ()):
            transfer = self._active[key] = self._transfers[key]
            for write_id, handle in transfer.handles.items():
                self._transport.give_up(handle)
                transfer.push.write_ended(write_id, error)
            transfer.handles.clear()
            transfer.push.fail(error)


def _outcome(transfer: _Transfer, now: float) -> PushDone | PushFailed:
    push = transfer.push
    if push.error is not None:
        return PushFailed(push.key, push.ticket.request_id, push.error)
    seconds = 0.0 if transfer.first_write_at is None else now - transfer.first_write_at
    return PushDone(push.key, push.ticket.request_id, transfer.num_bytes, seconds)
