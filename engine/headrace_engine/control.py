"""A rank's connection to its group's frontend (ZMQ DEALER): messages both ways, and knowing when the leader is gone."""

from __future__ import annotations

import os
import time

import msgspec
import zmq

from headrace_engine.messages import FromRank, ToRank

LEADER_SILENCE_SECONDS = 15.0  # the frontend says something every second
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10000
MAX_QUEUED_MESSAGES = 100_000


class LeaderLostError(RuntimeError):
    """Nothing has come from the group's leader for too long: this rank must end."""


def identity_of(rank: int) -> bytes:
    """The name under which the frontend's ROUTER socket knows a rank's connection."""
    return b"rank-%d" % rank


class ControlClient:
    """Not thread-safe, except `wake`."""

    def __init__(self, host: str, port: int, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity_of(rank))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(f"tcp://{host}:{port}")
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._last_heard = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Until a message or a `wake` comes, or the time is over."""
        self._poller.poll(int(seconds * 1000))

    def wake(self) -> None:
        """End a `wait`. For other threads."""
        os.eventfd_write(self._wake_fd, 1)

    def receive(self, *, check_silence: bool = True) -> list[ToRank]:
        """What has come, without waiting. Raises LeaderLostError, unless the leader may still be starting."""
        messages: list[ToRank] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        now = time.monotonic()
        if messages or not check_silence:
            self._last_heard = now
        elif now - self._last_heard > LEADER_SILENCE_SECONDS:
            raise LeaderLostError(f"the group's leader has said nothing for {LEADER_SILENCE_SECONDS:g} s")
        return messages

    def send(self, message: FromRank) -> None:
        """Queue a message. Raises LeaderLostError if the leader takes none any more."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise LeaderLostError("the group's leader takes no messages any more") from None

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        os.close(self._wake_fd)
