"""What a loading rank has read before it needs it: in which order, how far ahead, and when that ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine import models
from headrace_engine.models.headers import StoredTensor, read_headers, shard_files
from headrace_engine.models.read_ahead import ReadAhead, Span, reading_order

MIB = 1 << 20
WAIT_SECONDS = 10.0
A, B = Path("a"), Path("b")


def tensor(name: str, file: Path, start: int, end: int) -> StoredTensor:
    return StoredTensor(name, (end - start,), "U8", file, start, end)


def test_tensors_come_in_the_order_of_their_files_and_neighbours_as_one() -> None:
    layer = [tensor("w3", A, 60, 90), tensor("w1", B, 8, 20), tensor("w0", A, 8, 40), tensor("w2", A, 40, 60)]
    assert reading_order([layer], 1) == [Span(A, 8, 90), Span(B, 8, 20)]


def test_what_lies_between_tensors_is_left_out() -> None:
    assert reading_order([[tensor("w0", A, 8, 40), tensor("w2", A, 44, 60)]], 1) == [Span(A, 8, 40), Span(A, 44, 60)]


def test_scales_come_before_the_weights_that_need_them() -> None:
    layer = [tensor("w.weight", A, 8, 40), tensor("w.scale", A, 40, 42)]
    assert reading_order([layer], 1) == [Span(A, 40, 42), Span(A, 8, 40)]


def test_layers_that_are_loaded_together_take_turns() -> None:
    layers = [[tensor("w", file, 0, size * MIB)] for file, size in ((Path("0"), 2), (Path("1"), 3), (Path("2"), 1))]
    order = [(int(span.file.name), span.start // MIB) for span in reading_order(layers, 2)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 0)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3 * MIB), max_size=5), max_size=5),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_every_byte_is_asked_for_once_whatever_the_layers(sizes: list[list[int]], num_at_once: int, random) -> None:  # type: ignore[no-untyped-def]
    layers, end = [], 8
    for layer in sizes:
        layers.append([])
        for size in layer:
            layers[-1].append(tensor(f"{end}", A, end, end + size))
            end += size
        random.shuffle(layers[-1])
    spans = reading_order(layers, num_at_once)
    assert all(0 < span.num_bytes <= MIB for span in spans)
    in_file = sorted((span.start, span.end) for span in spans)
    assert all(before[1] == after[0] for before, after in pairwise(in_file))
    assert sum(span.num_bytes for span in spans) == end - 8


class Asked:
    """What was asked of the system, instead of the system."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._changed = threading.Condition()

    def advise(self, descriptor: int, start: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        with self._changed:
            self.starts.append(start)
            self._changed.notify()

    def wait_for(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.starts) >= count, WAIT_SECONDS)
            return list(self.starts)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(os, "posix_fadvise", asked.advise)
    return asked


@pytest.fixture
def spans(tmp_path: Path) -> list[Span]:
    """Ten of ten bytes."""
    (tmp_path / "file").write_bytes(bytes(100))
    return [Span(tmp_path / "file", start, start + 10) for start in range(0, 100, 10)]


def read_ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not read_ahead_threads()


def test_it_asks_no_further_than_its_bound_beyond_what_was_taken(asked: Asked, spans: list[Span]) -> None:
    with ReadAhead(spans, max_ahead_bytes=30) as ahead:
        assert asked.wait_for(3) == [0, 10, 20]
        ahead.took(5)
        ahead.took(5)
        assert asked.wait_for(4) == [0, 10, 20, 30]
        ahead.took(25)
        assert asked.wait_for(6) == [0, 10, 20, 30, 40, 50]
    assert len(asked.starts) == 6


def test_all_is_asked_for_once_it_is_taken_in_whatever_steps(asked: Asked, spans: list[Span]) -> None:
    with ReadAhead(spans, max_ahead_bytes=10) as ahead:
        for _ in range(100):
            ahead.took(1)
        assert asked.wait_for(10) == list(range(0, 100, 10))


def test_leaving_the_context_ends_one_that_waits(asked: Asked, spans: list[Span]) -> None:
    with ReadAhead(spans, max_ahead_bytes=20):
        asked.wait_for(2)
        assert read_ahead_threads()
    assert not read_ahead_threads()
    assert asked.starts == [0, 10]


def test_it_leaves_no_descriptor_open(asked: Asked, spans: list[Span]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with ReadAhead(spans):
        asked.wait_for(10)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_file_that_cannot_be_opened_is_left_to_those_who_read_it(tmp_path: Path) -> None:
    with ReadAhead([Span(tmp_path / "missing", 0, 10)]) as ahead:
        ahead.took(10)


def test_a_rank_asks_for_each_byte_that_it_reads_once_and_for_no_other(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Span] = []
    original = ReadAhead.__init__
    monkeypatch.setattr(ReadAhead, "__init__", lambda self, spans: (order.extend(spans), original(self, spans))[1])
    models.load(tiny_path, rank=1, num_ranks=2, expert_parallel=True)
    (file,) = shard_files(tiny_path)
    times_asked, times_needed = np.zeros((2, file.stat().st_size), dtype=np.int64)
    for span in order:
        times_asked[span.start : span.end] += 1
    for stored in read_headers([file]).values():
        of_others = stored.name.startswith("mtp.") or any(f".experts.{expert}." in stored.name for expert in range(4))
        times_needed[stored.start : stored.end] += not of_others
    assert np.array_equal(times_asked, times_needed)
