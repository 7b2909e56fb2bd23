"""Cutting a stream at event ends, however the bytes arrive."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.router.sse import EventReader, StreamBroken, ends_properly, parse_event

TICKET = b'event: ticket\ndata: {"a": 1}\n\n'
TOKENS = b'data: {"t": 1}\n\ndata: {"t": 2}\n\ndata: [DONE]\n\n'


class Chunks:
    def __init__(self, *chunks: bytes) -> None:
        self._chunks = list(chunks)

    async def readany(self) -> bytes:
        return self._chunks.pop(0) if self._chunks else b""


@given(st.lists(st.integers(1, len(TICKET + TOKENS) - 1), max_size=12))
def test_any_cutting_of_the_bytes_gives_the_same_events_and_only_whole_ones(cuts):
    stream = TICKET + TOKENS
    edges = [0, *sorted(set(cuts)), len(stream)]
    source = Chunks(*(stream[a:b] for a, b in itertools.pairwise(edges)))

    async def read() -> tuple[bytes, list[bytes]]:
        reader = EventReader(source, 1000)
        first = await reader.next_event()
        assert first is not None
        assert first.name == "ticket"
        passed = []
        while events := await reader.whole_events():
            passed.append(events)
        return first.data, passed

    data, passed = asyncio.run(read())
    assert data == b'{"a": 1}'
    assert all(events.endswith(b"\n\n") for events in passed)
    assert b"".join(passed) == TOKENS


async def test_bytes_that_are_whole_events_are_passed_on_uncopied():
    assert await EventReader(Chunks(TOKENS), 1000).whole_events() is TOKENS


@pytest.mark.parametrize("method", ["next_event", "whole_events"])
async def test_an_end_inside_an_event_is_a_broken_stream(method):
    with pytest.raises(StreamBroken, match="inside an event"):
        await getattr(EventReader(Chunks(b"data: {"), 1000), method)()


@pytest.mark.parametrize("method", ["next_event", "whole_events"])
async def test_an_event_without_end_is_bounded(method):
    with pytest.raises(StreamBroken, match="longer than 100 bytes"):
        await getattr(EventReader(Chunks(*[b"x" * 30] * 10), 100), method)()


async def test_the_end_of_the_stream_at_an_event_end_is_no_fault():
    reader = EventReader(Chunks(TICKET), 1000)
    assert (await reader.next_event()).name == "ticket"
    assert await reader.next_event() is None
    assert await reader.whole_events() == b""


def test_lines_of_data_are_joined_and_comments_are_dropped():
    event = parse_event(b": keep-alive\nevent: x\ndata: a\ndata:b\n\n")
    assert (event.name, event.data) == ("x", b"a\nb")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (TOKENS, True),
        (b"data: [DONE]\n\n", True),
        (b'data: {"t": 1}\n\ndata: {"error": {"message": "m"}}\n\n', True),
        (b'data: {"error": {"message": "m"}}\n\n', True),
        (b'data: {"t": "error"}\n\n', False),
        (b'event: a\ndata: {}\n\nevent: message_stop\ndata: {"type": "message_stop"}\n\n', True),
        (b'event: response.completed\ndata: {"type": "response.completed"}\n\n', True),
        (b'event: response.incomplete\ndata: {"type": "response.incomplete"}\n\n', True),
        (b'event: error\ndata: {"type": "error", "error": {"message": "m"}}\n\n', True),
        (b'event: message_delta\ndata: {"type": "message_delta"}\n\n', False),
        (b"data: nonsense\n\n", False),
    ],
)
def test_whether_a_stream_has_ended_properly(events, expected):
    assert ends_properly(events) is expected
