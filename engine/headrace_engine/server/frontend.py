"""The group's one meeting point of HTTP requests and ranks: placement, delivery, and knowing whether all is well.

A request goes to the rank with the fewest live requests, is charged to it at once and released when it ends, whoever
ends it. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from headrace_engine.config import EngineConfig
from headrace_engine.control import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, MAX_QUEUED_MESSAGES, identity_of
from headrace_engine.core import EngineRequest, Leg, RequestError, SamplingParams, Ticket
from headrace_engine.messages import (
    Abort,
    Add,
    Failed,
    FromRank,
    Hello,
    Pushed,
    RankState,
    Shutdown,
    Tokens,
    ToRank,
    Wake,
    Welcome,
)
from headrace_engine.server.errors import unavailable
from headrace_engine.server.handle import Item, RankView, RequestHandle

BEAT_SECONDS = 1.0  # ranks take a longer silence as the leader's death
MAX_UNREAD_ITEMS = 65_536  # of one request: its client reads too slowly

log = logging.getLogger(__name__)


class Frontend:
    """See the module. `on_failure` is called once, when the group cannot go on."""

    def __init__(self, config: EngineConfig, on_failure: Callable[[str], None]) -> None:
        self._config = config
        self._on_failure = on_failure
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self.ranks = [RankView(rank) for rank in range(config.data)]
        self._greeted: dict[bytes, RankView] = {}  # ranks that have said Hello, by the name of their connection
        self._handles: dict[str, RequestHandle] = {}
        self._last_placed = -1
        self._num_requests = 0
        self._failure: str | None = None
        self._is_shut_down = False
        self._beat: asyncio.Task[None] | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.is_draining = False
        self.drain_seconds = config.drain_seconds  # that requests in flight get once the pod is told to end
        self.all_ready = asyncio.Event()  # every rank has said Hello
        self.idle = asyncio.Event()  # no request is in flight
        self.idle.set()

    # --- life ---

    def start(self) -> None:
        """Listen for ranks. Raises OSError if the control port is taken."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        host = "127.0.0.1" if self._config.num_pods == 1 else "0.0.0.0"  # no other pod has business here
        try:
            self._socket.bind(f"tcp://{host}:{self._config.control_port}")
        except zmq.ZMQError as error:
            raise OSError(f"control port {self._config.control_port}: {error}") from error
        loop = asyncio.get_running_loop()
        loop.add_reader(int(self._socket.FD), self._read)
        self._beat = loop.create_task(self._beat_forever())

    async def close(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        asyncio.get_running_loop().remove_reader(int(self._socket.FD))
        self._socket.close()
        self._context.term()

    @property
    def is_ready(self) -> bool:
        """Every rank of the group takes requests, and new ones are wanted."""
        return not self.is_draining and self._failure is None and all(view.hello for view in self.ranks)

    @property
    def num_in_flight(self) -> int:
        return len(self._handles)

    def shut_down_ranks(self) -> None:
        """Ask every rank to leave once its requests have ended."""
        self._is_shut_down = True
        for view in self.ranks:
            if view.hello is not None:
                self._send(view.rank, Shutdown())

    def end_requests(self, reason: str) -> None:
        """Abort what is in flight; its clients get an error."""
        for handle in list(self._handles.values()):
            error = RequestError(503, reason, "service_unavailable", "draining", retriable=True)
            self._abort(handle, error)

    def fail(self, reason: str) -> None:
        """The group cannot go on: end every request with an error, tell the pod. Idempotent."""
        if self._failure is not None or self._is_shut_down:
            return
        self._failure = reason
        error = RequestError(
            503, f"the engine failed: {reason}", "service_unavailable", "engine_failed", retriable=True
        )
        for handle in list(self._handles.values()):
            self._finish(handle, Failed(handle.request_id, error))
        self._on_failure(reason)

    # --- requests ---

    def submit(
        self,
        label: str,
        leg: Leg,
        token_ids: list[int],
        sampling: SamplingParams,
        ticket: Ticket | None = None,
        shares_kv_of: RequestHandle | None = None,
    ) -> RequestHandle:
        """Place a request on a rank; label begins its id. shares_kv_of: as in EngineRequest. Raises ApiError (503)."""
        if self.is_draining:
            raise unavailable("this engine is draining", "draining")
        if self._failure is not None:
            raise unavailable(f"this engine has failed: {self._failure}", "engine_failed")
        if not self.is_ready:
            raise unavailable("this engine is still starting", "starting")
        view = self._place() if shares_kv_of is None else self.ranks[shares_kv_of.rank]
        self._num_requests += 1
        request_id = f"{label}#{self._num_requests}"
        handle = RequestHandle(request_id, view.rank, self._closed)
        self._handles[request_id] = handle
        self.idle.clear()
        view.num_live += 1
        timeout = self._config.request_timeout_seconds
        handle.set_deadline(asyncio.get_running_loop().call_later(timeout, self._expire, handle))
        leader = None if shares_kv_of is None else shares_kv_of.request_id
        self._send(view.rank, Add(EngineRequest(request_id, leg, token_ids, sampling, ticket, leader)))
        if self._config.has_collectives:
            for other in self.ranks:
                if other is not view:
                    self._send(other.rank, Wake())
        return handle

    def _place(self) -> RankView:
        """The rank with the fewest live requests; among equals the next after the last one chosen."""
        num_ranks = len(self.ranks)
        order = [(self._last_placed + 1 + i) % num_ranks for i in range(num_ranks)]
        chosen = min(order, key=lambda rank: self.ranks[rank].num_live)
        self._last_placed = chosen
        return self.ranks[chosen]

    def _expire(self, handle: RequestHandle) -> None:
        seconds = self._config.request_timeout_seconds
        self._abort(handle, RequestError(504, f"the request was not done within {seconds:g} s", "timeout", "timeout"))

    def _abort(self, handle: RequestHandle, error: RequestError) -> None:
        if handle.is_ended:
            return
        self._send(handle.rank, Abort(handle.request_id))
        self._finish(handle, Failed(handle.request_id, error))

    def _closed(self, handle: RequestHandle) -> None:
        if not handle.is_ended:
            self._send(handle.rank, Abort(handle.request_id))
            self._release(handle)

    def _finish(self, handle: RequestHandle, last: Item) -> None:
        self._release(handle)
        handle.deliver(last)

    def _release(self, handle: RequestHandle) -> None:
        if self._handles.pop(handle.request_id, None) is not None:
            handle.is_ended = True
            self.ranks[handle.rank].num_live -= 1
            if not self._handles:
                self.idle.set()

    # --- messages ---

    def _send(self, rank: int, message: ToRank) -> None:
        try:
            self._socket.send_multipart([identity_of(rank), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.fail(f"rank {rank} is gone ({error})")
            return
        # The socket's descriptor is edge-triggered: sending may have taken the edge that stood for a message.
        if int(self._socket.EVENTS) & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        """Take every message that has come."""
        while not self._socket.closed:
            try:
                identity, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue  # not two frames: not a rank
            try:
                message = self._decoder.decode(payload)
            except msgspec.DecodeError as error:
                log.warning("dropped an unreadable message from %r: %s", identity, error)
                continue
            self._take(identity, message)

    def _take(self, identity: bytes, message: FromRank) -> None:
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        view = self._greeted.get(identity)
        if view is None:
            log.warning("dropped a message from %r, which has not said Hello", identity)
        elif isinstance(message, RankState):
            view.report(message, time.monotonic())
        else:
            for item in message.items:
                self._deliver(item, view)

    def _deliver(self, item: Item, sender: RankView) -> None:
        handle = self._handles.get(item.request_id)
        if handle is None:
            return  # closed: the client has left, and the rank will soon hear of it
        if handle.rank != sender.rank:
            log.warning(
                "dropped a word of rank %d on %s, which rank %d has", sender.rank, handle.request_id, handle.rank
            )
            return
        is_last = isinstance(item, Pushed | Failed) or (isinstance(item, Tokens) and item.finish_reason is not None)
        if is_last:
            self._finish(handle, item)
            return
        handle.deliver(item)
        if handle.num_unread > MAX_UNREAD_ITEMS:
            self._abort(handle, RequestError(503, "the client reads too slowly", "service_unavailable", "slow_client"))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if not 0 <= hello.rank < len(self.ranks) or identity != identity_of(hello.rank):
            log.error("%r is no rank of this group of %d", identity, len(self.ranks))
            return
        view = self.ranks[hello.rank]
        if view.hello is not None and view.hello.incarnation != hello.incarnation:
            self.fail(f"rank {hello.rank} was replaced by another process")
            return
        others = {other.hello.fingerprint for other in self.ranks if other.hello is not None}
        if others - {hello.fingerprint}:
            self.fail(f"rank {hello.rank} has another KV fingerprint than the others: are the models the same?")
            return
        view.hello = hello
        self._greeted[identity] = view
        self._send(hello.rank, Welcome())
        num_ready = sum(other.hello is not None for other in self.ranks)
        log.info("rank %d is ready (%d of %d)", hello.rank, num_ready, len(self.ranks))
        if num_ready == len(self.ranks):
            self.all_ready.set()

    async def _beat_forever(self) -> None:
        """Tell ranks that we live; a rank whose connection is gone makes the send fail."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            started = time.monotonic()
            for view in self.ranks:
                if view.hello is not None and not self._is_shut_down:
                    self._send(view.rank, Welcome())
            self._read()
            if time.monotonic() - started > BEAT_SECONDS:
                log.warning("talking to the ranks took %.1f s", time.monotonic() - started)

    # --- limits ---

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer that every rank takes. Raises ApiError (503) before the group is ready."""
        lengths = [view.hello.max_model_len for view in self.ranks if view.hello is not None]
        if len(lengths) != len(self.ranks):
            raise unavailable("this engine is still starting", "starting")
        return min(lengths)

    @property
    def fingerprint(self) -> str:
        return next((view.hello.fingerprint for view in self.ranks if view.hello is not None), "")
