"""The transfer agent of one rank: pushes KV to decode ranks, receives it from prefill ranks, in a thread of its own.

The rank loop calls it and polls its events; neither ever waits for the network. The thread owns the transport: it looks
often while a write is running or awaited, seldom otherwise, wakes on commands, and never spins.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace_engine.core import Peer, Ticket
from headrace_engine.kv.events import TransferEvent, TransferStats
from headrace_engine.kv.nixl import NixlTransport
from headrace_engine.kv.push import PushKey
from headrace_engine.kv.ticket import CacheRegion, TicketError, TicketIssuer, check_ticket
from headrace_engine.kv.worker import Worker

WRITE_TIMEOUT_SECONDS = 10.0
MAX_COMMANDS = 1 << 16
MAX_REMEMBERED_TICKETS = 1 << 16
START_TIMEOUT_SECONDS = 60.0
CLOSE_TIMEOUT_SECONDS = 5.0


class TransferThreadError(RuntimeError):
    """The agent's thread cannot start, has died or does not keep up: the rank must end."""


class TransferAgent:
    """See the module. All methods are for one thread, the rank loop's; none blocks but the constructor and `close`.

    name: this rank's stable name (pod and rank); with the incarnation it makes the agent's name. regions: one per cache
    group, in the model's order; the caller keeps their memory alive until `close` has returned. wake: called from
    the agent's thread when there are new events. Raises TransferThreadError if the transport cannot start.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        regions: Sequence[CacheRegion],
        *,
        block_size: int,
        fingerprint: str,
        lease_seconds: float,
        wake: Callable[[], None] | None = None,
        write_timeout_seconds: float = WRITE_TIMEOUT_SECONDS,
    ) -> None:
        self._regions = tuple(regions)
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._wake = wake
        self._write_timeout_seconds = write_timeout_seconds
        self._lease_seconds = lease_seconds
        self._commands: deque[Callable[[Worker], None]] = deque()
        self._events: deque[TransferEvent] = deque()
        self._stats = TransferStats()
        self._seen: OrderedDict[PushKey, None] = OrderedDict()
        self._has_command = threading.Event()
        self._started = threading.Event()
        self._closing = False
        self._failure: BaseException | None = None
        self._peer: Peer | None = None
        self._thread = threading.Thread(target=self._run, args=(f"{name}/{incarnation}",), name="transfer", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_SECONDS) or self._peer is None:
            raise TransferThreadError(f"the KV transport did not start: {self._failure}") from self._failure
        self.peer: Peer = self._peer
        self._issuer: TicketIssuer = TicketIssuer(incarnation, fingerprint, self.peer, block_size, lease_seconds)

    # --- decode ---

    def issue_ticket(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_held_tokens: int,
        block_ids: Sequence[int],
        state_slot: int,
    ) -> Ticket:
        """A ticket for reserved blocks and a slot. Exactly one Received or ReceiveFailed of its generation follows.

        Until that event a peer may write into the blocks from `num_held_tokens` on and into the slot: a request that
        ends earlier leaves them in quarantine. A ReceiveLost may come before it: the request fails then, and the blocks
        wait for the ReceiveFailed.
        """
        ticket = self._issuer.issue(request_id, token_ids, num_held_tokens, block_ids, state_slot)
        now = time.monotonic()
        self._command(lambda worker: worker.receiver.expect(ticket.generation, request_id, now))
        return ticket

    def abandon(self, generation: int) -> None:
        """The request of this ticket has ended: prefill gets no more time for it, and its event still comes."""
        self._command(lambda worker: worker.receiver.abandon(generation))

    # --- prefill ---

    def open_push(self, ticket: Ticket, token_ids: Sequence[int]) -> PushKey:
        """Accept a ticket for these prompt tokens, on arrival: decode waits a lease for somebody to take it.

        From now on its lease is kept alive, however long the request queues and computes, until the push ends.

        Raises TicketError if it does not fit this rank or prompt, or was accepted before. Else exactly one PushDone or
        PushFailed of the key follows; until then the local blocks and slot given to the push must not be reused.
        """
        check_ticket(
            ticket,
            token_ids=token_ids,
            fingerprint=self._fingerprint,
            block_size=self._block_size,
            regions=self._regions,
        )
        key = (ticket.incarnation, ticket.generation)
        if key in self._seen:
            raise TicketError(409, "stale_ticket", "this ticket was used before; a retry needs a new one")
        self._seen[key] = None
        if len(self._seen) > MAX_REMEMBERED_TICKETS:
            self._seen.popitem(last=False)
        now = time.monotonic()
        self._command(lambda worker: worker.pusher.open(ticket, now))
        return key

    def push_blocks(self, key: PushKey, first_block: int, local_block_ids: Sequence[int]) -> None:
        """Sequence blocks from `first_block` on are complete in these local blocks: each once, in order, from 0."""
        blocks = tuple(local_block_ids)
        self._command(lambda worker: worker.pusher.blocks_complete(key, first_block, blocks))

    def finish_push(self, key: PushKey, local_slot: int, num_cached_tokens: int) -> None:
        """Every block was given; `local_slot` holds the state of all prompt tokens but the last (of one: ignored)."""
        self._command(lambda worker: worker.pusher.finish(key, local_slot, num_cached_tokens))

    def cancel_push(self, key: PushKey, reason: str) -> None:
        """Start no more writes and tell decode. Without effect if the last write has started or the push has ended."""
        self._command(lambda worker: worker.pusher.cancel(key, reason))

    # --- both ---

    def poll_events(self) -> list[TransferEvent]:
        """Events since the last call. Raises TransferThreadError if the thread has died."""
        self._raise_if_dead()
        return [self._events.popleft() for _ in range(len(self._events))]

    def stats(self) -> TransferStats:
        """As of the thread's last look."""
        return replace(self._stats)

    def close(self) -> None:
        """Cancel what is open (decode is told), end the thread, deregister the memory."""
        self._closing = True
        self._has_command.set()
        self._thread.join(CLOSE_TIMEOUT_SECONDS + START_TIMEOUT_SECONDS)

    def _command(self, command: Callable[[Worker], None]) -> None:
        self._raise_if_dead()
        if len(self._commands) >= MAX_COMMANDS:
            raise TransferThreadError(f"the transfer thread does not keep up: {MAX_COMMANDS} commands wait")
        self._commands.append(command)
        self._has_command.set()

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise TransferThreadError(f"the transfer thread has died: {self._failure!r}") from self._failure

    # --- the thread ---

    def _run(self, agent_name: str) -> None:
        try:
            transport = NixlTransport(agent_name, self._regions)
            try:
                self._peer = transport.peer
                self._started.set()
                worker = Worker(
                    transport, self._regions, self._block_size, self._lease_seconds, self._write_timeout_seconds
                )
                self._serve(worker)
            finally:
                transport.close()
        except BaseException as error:
            self._failure = error
            self._started.set()
            if self._wake is not None:
                self._wake()

    def _serve(self, worker: Worker) -> None:
        close_by: float | None = None
        while close_by is None or (worker.has_work_before_closing(time.monotonic()) and time.monotonic() < close_by):
            self._has_command.wait(worker.pause_seconds)
            self._has_command.clear()
            self._obey(worker)
            if self._closing and close_by is None:
                close_by = time.monotonic() + CLOSE_TIMEOUT_SECONDS
                worker.pusher.cancel_all("the prefill engine is shutting down")
            events = worker.step(lambda: self._obey(worker))
            self._stats = replace(worker.stats)
            if events:
                self._events.extend(events)
                if self._wake is not None:
                    self._wake()

    def _obey(self, worker: Worker) -> None:
        for _ in range(len(self._commands)):
            self._commands.popleft()(worker)
