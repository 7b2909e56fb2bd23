"""One look at everything a rank's transfers need: mail, deadlines, writes; and how long to wait before the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from headrace_engine.core import Peer
from headrace_engine.kv.connections import Connections
from headrace_engine.kv.events import PushDone, PushFailed, TransferEvent, TransferStats
from headrace_engine.kv.lease import LANDING_SLACK_SECONDS
from headrace_engine.kv.nixl import NixlTransport, TransportError
from headrace_engine.kv.notices import MAX_GENERATIONS, Renew, Renewed, decode_notice, encode_notice
from headrace_engine.kv.pusher import Pusher
from headrace_engine.kv.receive import Received, ReceiveEvent, ReceiveFailed, Receiver
from headrace_engine.kv.ticket import CacheRegion
from headrace_engine.models.protocol import GroupKind

WRITING_SECONDS = 0.0001  # between looks while a write runs: a TCP connection moves only when looked at
AWAITING_SECONDS = 0.0005  # while KV or a lease is awaited: small writes land only when the target looks
IDLE_SECONDS = 0.01
MAX_WRITE_BYTES = 64 << 20  # one write holds the thread for as long as its copy takes over shared memory: some 15 ms
LINGER_SECONDS = 0.5  # a notification has no completion of its own: keep it moving this long before closing

log = logging.getLogger(__name__)


class Worker:
    """What the agent's thread owns. Nothing here is for another thread."""

    def __init__(
        self,
        transport: NixlTransport,
        regions: Sequence[CacheRegion],
        block_size: int,
        lease_seconds: float,
        write_timeout_seconds: float,
    ) -> None:
        item_bytes = {
            kind: sum(cache.region.item_bytes for cache in regions if cache.kind is kind) for kind in GroupKind
        }
        self._transport = transport
        self._connections = Connections(transport)
        self.pusher = Pusher(
            transport,
            self._connections,
            transport.peer.agent_metadata,
            block_size=block_size,
            block_bytes=item_bytes[GroupKind.PAGED],
            slot_bytes=item_bytes[GroupKind.STATE],
            max_write_bytes=MAX_WRITE_BYTES,
            write_timeout_seconds=write_timeout_seconds,
        )
        landing_seconds = write_timeout_seconds + LANDING_SLACK_SECONDS
        self.receiver = Receiver(time.monotonic(), lease_seconds, landing_seconds)
        self.stats = TransferStats()

    @property
    def pause_seconds(self) -> float:
        if self.pusher.has_more:
            return 0.0
        if self.pusher.is_writing:
            return WRITING_SECONDS
        is_awaiting = self.receiver.num_wanted > 0 or self.pusher.awaits_lease
        return AWAITING_SECONDS if is_awaiting else IDLE_SECONDS

    def has_work_before_closing(self, now: float) -> bool:
        last = self.pusher.last_notified_at
        return not self.pusher.is_idle or (last is not None and now < last + LINGER_SECONDS)

    def step(self, obey: Callable[[], None]) -> list[TransferEvent]:
        """One look at everything. Mail before deadlines: a late completion must not lose against its own.

        obey: carries out what other threads have told so far. That a ticket is expected was told before anybody could
        know of it, so before its mail came; but looking for mail may take long (a new peer connects), and mail that
        came meanwhile would find tickets of that time unknown.
        """
        self.pusher.end_old_writes()
        mail = self._transport.notifications()
        obey()
        now = time.monotonic()  # not before the look for mail: see `Receiver.renew`
        events: list[TransferEvent] = []
        for sender, message in mail:
            outcome = self._take(sender, message, now)
            if outcome is not None:
                events.append(outcome)
        events.extend(self.receiver.expire(now))
        events.extend(self.pusher.step())
        for event in events:
            self._count(event)
        self.pusher.add_to(self.stats)
        self.stats.num_peers = len(self._connections)
        self.stats.num_expected = self.receiver.num_open
        self.stats.num_stale_notices_total = self.receiver.num_stale
        self.stats.oldest_age_seconds = max(self.pusher.oldest_age(now), self.receiver.oldest_age(now))
        return events

    def _take(self, sender: str, message: bytes, now: float) -> ReceiveEvent | None:
        notice = decode_notice(message)
        if isinstance(notice, Renew):
            self._answer(sender, notice, now)
            return None
        if isinstance(notice, Renewed):
            self.pusher.renewed(sender, notice)
            return None
        return self.receiver.complete(sender, notice, now)

    def _answer(self, sender: str, request: Renew, now: float) -> None:
        """Grant what may be granted. An answer that cannot be sent is as good as a lost one: the lease runs out."""
        granted, refused = self.receiver.renew(sender, request.generations[:MAX_GENERATIONS], now)
        in_use = self.receiver.holders.union(self.pusher.peer_names)
        try:
            self._connections.use(Peer(sender, request.metadata, ()), in_use)
            self._transport.notify(sender, encode_notice(Renewed(request.sent_at, granted, refused)))
        except TransportError as error:
            self._connections.drop(sender)  # the next request is answered over a new connection
            log.warning("cannot answer %s: %s", sender, error)

    def _count(self, event: TransferEvent) -> None:
        stats = self.stats
        if isinstance(event, PushDone | PushFailed):
            stats.num_pushes_total += 1
            if isinstance(event, PushFailed):
                stats.num_push_failures_total += 1
            else:
                stats.pushed_bytes_total += event.num_bytes
                stats.push_seconds_total += event.seconds
        elif isinstance(event, Received | ReceiveFailed):
            stats.num_receives_total += 1
            stats.num_receive_failures_total += isinstance(event, ReceiveFailed)
