"""Carries pushes out: drives each `Push` over the transport, and keeps the connections to decode ranks.

Everything here runs in the transfer agent's thread. `Transport` is what it needs of `nixl.NixlTransport`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_engine.core import Peer, Ticket
from headrace_engine.kv.events import PushDone, PushFailed, TransferStats
from headrace_engine.kv.nixl import TransportError, WriteHandle, WriteState
from headrace_engine.kv.push import Notify, Push, PushKey, Write
from headrace_engine.kv.ticket import encode_completion

MAX_PEERS = 256  # connections kept; the least recently used idle one goes first


class Transport(Protocol):
    """See `nixl.NixlTransport`, whose methods these are."""

    def connect(self, peer: Peer) -> None: ...

    def disconnect(self, peer_name: str) -> None: ...

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

    write_timeout_seconds: a write that takes longer is given up, by ending the connection to its peer: a running
    write cannot be taken back in any other way.
    """

    def __init__(
        self,
        transport: Transport,
        block_size: int,
        block_bytes: int,
        slot_bytes: int,
        max_write_bytes: int,
        write_timeout_seconds: float,
    ) -> None:
        self._transport = transport
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._slot_bytes = slot_bytes
        self._max_blocks_per_write = max(1, max_write_bytes // max(1, block_bytes))
        self._write_timeout_seconds = write_timeout_seconds
        self._transfers: dict[PushKey, _Transfer] = {}
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # least recently used first
        self.last_notified_at: float | None = None
        self.has_more = False

    @property
    def is_writing(self) -> bool:
        return any(transfer.handles for transfer in self._transfers.values())

    @property
    def is_idle(self) -> bool:
        return not self._transfers

    def oldest_age(self, now: float) -> float:
        return max((now - transfer.push.accepted_at for transfer in self._transfers.values()), default=0.0)

    def open(self, ticket: Ticket, accepted_at: float) -> None:
        """Begin a push whose ticket has been checked. A peer that cannot be reached fails it at the next step."""
        push = Push(ticket, self._block_size, self._max_blocks_per_write, accepted_at)
        try:
            self._connect(ticket.peer)
            push.peer_connected()
        except TransportError as error:
            push.fail(str(error))
        self._transfers[push.key] = _Transfer(push)

    def blocks_complete(self, key: PushKey, first_block: int, local_blocks: Sequence[int]) -> None:
        if key in self._transfers:  # else it has ended, and its event is on the way
            self._transfers[key].push.blocks_complete(first_block, local_blocks)

    def finish(self, key: PushKey, local_slot: int, num_cached_tokens: int) -> None:
        if key in self._transfers:
            self._transfers[key].push.finish(local_slot, num_cached_tokens)

    def cancel(self, key: PushKey, reason: str) -> None:
        if key in self._transfers:
            self._transfers[key].push.fail(reason)

    def cancel_all(self, reason: str) -> None:
        for transfer in self._transfers.values():
            transfer.push.fail(reason)

    def step(self, now: float) -> list[PushDone | PushFailed]:
        """Look after every push once; returns those that have ended.

        Each does one thing a step, so that a long push (a write over shared memory copies before it returns) keeps
        neither the others nor incoming notifications waiting. `has_more` says to come back at once.
        """
        self.has_more = False
        for transfer in self._transfers.values():
            self._look_at_writes(transfer, now)
        for transfer in self._transfers.values():
            action = transfer.push.next_action(now)
            if isinstance(action, Write):
                self._write(transfer, action, now)
            elif isinstance(action, Notify):
                self._notify(transfer, action, now)
            self.has_more |= action is not None
        over = [transfer for transfer in self._transfers.values() if transfer.push.is_over]
        for transfer in over:
            del self._transfers[transfer.push.key]
        return [_outcome(transfer, now) for transfer in over]

    def add_to(self, stats: TransferStats) -> None:
        stats.num_pushing = len(self._transfers)
        stats.num_peers = len(self._peers)

    def _look_at_writes(self, transfer: _Transfer, now: float) -> None:
        for write_id, handle in list(transfer.handles.items()):
            state = self._transport.poll(handle)
            if state is WriteState.RUNNING:
                continue
            transfer.handles.pop(write_id, None)
            transfer.push.write_ended(write_id, None if state is WriteState.DONE else "a write failed")
            if state is WriteState.FAILED:
                self._lose_peer(transfer.peer_name, "the connection to decode broke")
                return
        if transfer.push.oldest_write_age(now) > self._write_timeout_seconds:
            self._lose_peer(transfer.peer_name, f"a write took longer than {self._write_timeout_seconds:g} s")

    def _write(self, transfer: _Transfer, write: Write, now: float) -> None:
        notification = encode_completion(write.completion) if write.completion else b""
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
        self._look_at_writes(transfer, now)  # small and local writes end at once

    def _notify(self, transfer: _Transfer, notify: Notify, now: float) -> None:
        """Tell decode, over a new connection if a failed write has cost the old one: it must not wait for the lease."""
        self.last_notified_at = now
        try:
            self._connect(transfer.push.ticket.peer)
            self._transport.notify(transfer.peer_name, encode_completion(notify.completion))
            transfer.push.notified()
        except TransportError as error:
            transfer.push.notified(str(error))

    def _connect(self, peer: Peer) -> None:
        known = self._peers.get(peer.agent_name)
        if known == peer:
            self._peers.move_to_end(peer.agent_name)
            return
        in_use = {transfer.peer_name for transfer in self._transfers.values()}
        if known is not None:
            if peer.agent_name in in_use:
                raise TransportError(f"{peer.agent_name!r} is in use with other regions or metadata")
            self._disconnect(peer.agent_name)
        rank_name = _rank_name(peer)
        for name, other in list(self._peers.items()):
            is_old_life = _rank_name(other) == rank_name
            if name not in in_use and (is_old_life or len(self._peers) >= MAX_PEERS):
                self._disconnect(name)
        if len(self._peers) >= MAX_PEERS:
            raise TransportError(f"{MAX_PEERS} decode ranks are being written to; no more connections")
        self._transport.connect(peer)
        self._peers[peer.agent_name] = peer

    def _disconnect(self, name: str) -> None:
        del self._peers[name]
        self._transport.disconnect(name)

    def _lose_peer(self, name: str, error: str) -> None:
        """End the connection; every write to this peer has ended then, and every push to it fails."""
        if name in self._peers:
            self._disconnect(name)
        for transfer in self._transfers.values():
            if transfer.peer_name == name:
                for write_id, handle in transfer.handles.items():
                    self._transport.give_up(handle)
                    transfer.push.write_ended(write_id, error)
                transfer.handles.clear()
                transfer.push.fail(error)


def _rank_name(peer: Peer) -> str:
    """An agent's name without its incarnation: the same for every life of a rank."""
    return peer.agent_name.rpartition("/")[0]


def _outcome(transfer: _Transfer, now: float) -> PushDone | PushFailed:
    push = transfer.push
    if push.error is not None:
        return PushFailed(push.key, push.ticket.request_id, push.error)
    seconds = 0.0 if transfer.first_write_at is None else now - transfer.first_write_at
    return PushDone(push.key, push.ticket.request_id, transfer.num_bytes, seconds)
