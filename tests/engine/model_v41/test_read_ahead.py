"""Rows of engram's tables are asked for before a step needs them: the right pages, and no others."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tests.engine.model.harness import PagedRun, random_tokens

from headrace_engine.models import page_advice
from headrace_engine.models.background import Background
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.mapped_rows import MappedRows

DEADLINE_SECONDS = 20.0


@settings(max_examples=40, deadline=None)
@given(
    address=st.integers(0, 10_000),
    row_bytes=st.integers(1, 600),
    rows=st.lists(st.integers(0, 500), min_size=1, max_size=20),
)
def test_ranges_are_exactly_the_pages_of_the_rows(address: int, row_bytes: int, rows: list[int]) -> None:
    page = 128
    expected = {
        byte // page for row in rows for byte in range(address + row * row_bytes, address + (row + 1) * row_bytes)
    }
    ranges = page_advice.page_ranges(address, row_bytes, np.array(rows, dtype=np.int64), page).tolist()
    covered = [start // page + i for start, num_bytes in ranges for i in range(num_bytes // page)]
    assert covered == sorted(expected)
    assert all(start % page == 0 == num_bytes % page for start, num_bytes in ranges)
    ends = [start + num_bytes for start, num_bytes in ranges]
    assert all(end < start for end, (start, _) in zip(ends, ranges[1:], strict=False))  # none could be one


def advice_of(x: torch.Tensor) -> set[str]:
    """Flags of the mapping that holds x, as proc(5) lists them: rr random reads, sr sequential ones."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            is_inside = start <= x.data_ptr() < end
        elif is_inside and words[0] == "VmFlags:":
            return {"rr", "sr"}.intersection(words)
    raise AssertionError("x is in no mapping")


def test_each_tensor_of_a_file_has_the_advice_that_it_was_given(tmp_path: Path) -> None:
    pages = 40 * mmap.PAGESIZE
    save_file({name: torch.zeros(pages, dtype=torch.uint8) for name in ("a", "b", "c")}, tmp_path / "file")
    with safe_open(tmp_path / "file", framework="pt") as opened:
        tensors = [opened.get_tensor(name) for name in ("a", "b", "c")]
        page_advice.expect_sequential_reads(tensors[0])
        page_advice.expect_random_reads(tensors[2])
        middles = [x[pages // 2 :] for x in tensors]
        assert [advice_of(x) for x in middles] == [{"sr"}, set(), {"rr"}]


def test_pages_of_asked_rows_arrive_and_the_rest_of_the_table_stays_on_disk(tmp_path: Path) -> None:
    """A table of 256 pages that the system has forgotten; one row is read, the others are only asked for."""
    file, row_bytes, num_rows = tmp_path / "table.safetensors", 256, 4096
    save_file({"table": torch.zeros(num_rows, row_bytes, dtype=torch.uint8)}, file)
    with safe_open(file, framework="pt") as checkpoint:
        table = checkpoint.get_tensor("table")
    rows = MappedRows(table, None)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _resident_rows(table).sum() > num_rows // 4:
        pytest.skip("this file system keeps its files in memory")
    before, rows_of_a_page = _resident_rows(table).sum(), mmap.PAGESIZE // row_bytes
    rows.gather(torch.tensor([500]), torch.uint8)
    assert _resident_rows(table).sum() - before <= 2 * rows_of_a_page, "pages around it came along"
    asked = torch.tensor([1000, 2000, 3000])
    rows.read_ahead(asked)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not _resident_rows(table)[asked.numpy()].all():
        assert time.monotonic() < deadline, "the pages never came"
        time.sleep(0.001)
    assert _resident_rows(table).sum() <= num_rows // 4


def _resident_rows(table: torch.Tensor) -> np.ndarray:
    """[rows] bool: whether the page that a row begins in is in memory."""
    first = table.data_ptr() // mmap.PAGESIZE
    last = (table.data_ptr() + table.nbytes - 1) // mmap.PAGESIZE
    states = (ctypes.c_ubyte * (last - first + 1))()
    size = (last - first + 1) * mmap.PAGESIZE
    mincore = ctypes.CDLL(None).mincore
    assert mincore(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(size), states) == 0
    pages = (table.data_ptr() + np.arange(len(table)) * table.stride(0)) // mmap.PAGESIZE - first
    return np.frombuffer(states, dtype=np.uint8)[pages] % 2 == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The rows that were asked for, by the address of their table."""
    rows: dict[int, list[int]] = {}

    def record(x: torch.Tensor, own: torch.Tensor) -> None:
        rows.setdefault(x.data_ptr(), []).extend(own.tolist())

    monkeypatch.setattr(page_advice, "read_ahead", record)
    return rows


@pytest.mark.parametrize("num_tokens", [1, 7, 2500])
def test_a_prompt_is_asked_for_as_its_steps_will_read_it(
    model: DeepseekV41, asked: dict[int, list[int]], num_tokens: int
) -> None:
    """Also where a prompt is asked for in parts: n-grams look back over their borders."""
    tokens = random_tokens(num_tokens, seed=0)
    model.read_ahead(tokens)
    _wait(model)
    assert list(asked.values()) == _rows(model, tokens)


def test_a_sampled_token_is_asked_for_when_its_step_begins(model: DeepseekV41, asked: dict[int, list[int]]) -> None:
    tokens = random_tokens(90, seed=0)
    run = PagedRun(model)
    sequence = run.sequence(100)
    run.step([(sequence, tokens[:89])])  # a prompt's: asked for before, when it arrived
    _wait(model)
    assert not asked
    run.step([(sequence, tokens[89:])])
    _wait(model)
    assert list(asked.values()) == [own[-len(own) // 90 :] for own in _rows(model, tokens)]


def _rows(model: DeepseekV41, tokens: list[int]) -> list[list[int]]:
    """Of each table, computed for the whole prompt at once."""
    assert model.engrams is not None
    hashes = model.engrams.hashes
    padded = torch.tensor([-1] * hashes.num_previous + tokens)
    return hashes.rows(padded.unfold(0, hashes.num_previous + 1, 1).flip(1)).flatten(1).tolist()


def _wait(model: DeepseekV41) -> None:
    """Until everything that was asked for has been."""
    assert model.engrams is not None
    done = threading.Event()
    assert model.engrams.reader.submit(done.set)
    assert done.wait(DEADLINE_SECONDS)


def test_work_beyond_the_bound_is_dropped_and_errors_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    background, running, go, done = Background("test", 2), threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        running.set()
        assert go.wait(DEADLINE_SECONDS)
        raise OSError("no such page")

    assert background.submit(block)
    assert running.wait(DEADLINE_SECONDS)
    assert [background.submit(done.set) for _ in range(3)] == [True, True, False]
    go.set()
    assert done.wait(DEADLINE_SECONDS)
    assert "no such page" in caplog.text


def test_the_thread_ends_with_its_owner_whatever_is_waiting() -> None:
    background, running, go = Background("short-lived", 2), threading.Event(), threading.Event()

    def block() -> None:
        running.set()
        go.wait(DEADLINE_SECONDS)

    background.submit(block)
    assert running.wait(DEADLINE_SECONDS)
    for _ in range(2):
        background.submit(lambda: None)
    thread = next(each for each in threading.enumerate() if each.name == "short-lived")
    del background
    go.set()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
