"""Server-sent events as they arrive from a decode group: the first ones one by one, the rest as whole-event bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
# Streams of named events (Responses, Messages): how they begin, and how they end well.
FIRST_NAMES = frozenset({"response.created", "message_start"})
LAST_NAMES = frozenset({"response.completed", "response.incomplete", "message_stop"})


class StreamBroken(Exception):
    """The stream ended inside an event, or one event is larger than allowed."""


class ByteSource(Protocol):
    """What is read from: `aiohttp.StreamReader`, or a test's list of chunks."""

    async def readany(self) -> bytes:
        """Some bytes; b"" at the end."""


@dataclass(frozen=True)
class Event:
    """One event. `raw` is the bytes as they came, with the blank line that ends them."""

    name: str  # "" if the event has no name, as those of completions
    data: bytes
    raw: bytes


def parse_event(raw: bytes) -> Event:
    name, data = "", []
    for line in raw.split(b"\n"):
        if line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    return Event(name, b"\n".join(data), raw)


def ends_properly(events: bytes) -> bool:
    """True if the last of these whole events ends an answer, or says itself that the request failed."""
    if events.endswith(DONE):
        return True
    start = events.rfind(EVENT_END, 0, -len(EVENT_END))
    last = parse_event(events[start + len(EVENT_END) if start >= 0 else 0 :])
    if last.name in LAST_NAMES:
        return True
    try:
        payload = msgspec.json.decode(last.data)
    except msgspec.DecodeError:
        return False
    return isinstance(payload, dict) and bool(payload.get("error"))


class EventReader:
    """Cuts a byte stream at event ends. Events longer than `max_event_bytes` break the stream."""

    def __init__(self, source: ByteSource, max_event_bytes: int) -> None:
        self._source = source
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()

    async def next_event(self) -> Event | None:
        """The next event; None at the end of the stream. Raises StreamBroken."""
        searched = 0
        while (end := self._buffer.find(EVENT_END, searched)) < 0:
            searched = max(0, len(self._buffer) - 1)
            if not await self._fill():
                return None
        end += len(EVENT_END)
        raw = bytes(self._buffer[:end])
        del self._buffer[:end]
        return parse_event(raw)

    async def whole_events(self) -> bytes:
        """All whole events that have arrived, at least one, unchanged; b"" at the end. Raises StreamBroken.

        The tail of an event that is still arriving is held back, so that what has been passed on always ends at an
        event's end and an error event can follow it.
        """
        if not self._buffer:
            chunk = await self._source.readany()
            if chunk.endswith(EVENT_END) or not chunk:
                return chunk
            self._buffer += chunk
        searched = 0
        while (end := self._buffer.rfind(EVENT_END, searched)) < 0:
            searched = max(0, len(self._buffer) - 1)
            if not await self._fill():
                return b""
        end += len(EVENT_END)
        events = bytes(self._buffer[:end])
        del self._buffer[:end]
        return events

    async def _fill(self) -> bool:
        """Read once. False at the end of the stream."""
        if len(self._buffer) > self._max_event_bytes:
            raise StreamBroken(f"one event is longer than {self._max_event_bytes} bytes")
        chunk = await self._source.readany()
        if not chunk and self._buffer:
            raise StreamBroken("the stream ended inside an event")
        self._buffer += chunk
        return bool(chunk)
