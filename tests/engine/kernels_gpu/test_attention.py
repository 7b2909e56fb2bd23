"""Decode attention at the published head sizes, against the reference of the CPU kernel."""

from __future__ import annotations

import pytest
import torch
from tests.engine.kernels.compare import assert_close

from headrace_engine.kernels import Entries, shared_kv_attention
from headrace_engine.kernels.cases import Random, angles, make_batch, num_blocks
from headrace_engine.kernels.gpu import attention as gpu
from headrace_engine.kernels.gpu import launch
from headrace_engine.kernels.gpu.pages import plain_rows, scatter_entries_reference
from headrace_engine.kernels.gpu.records import Pages
from headrace_engine.kv.records import KV_288, KV_528, KV_584, RecordFormat
from headrace_engine.models.protocol import ForwardBatch

HEADS, DIM, HALF, WINDOW, RATIO, BLOCK = 64, 512, 32, 128, 4, 256


def _case(random: Random, batch: ForwardBatch, heads: int = HEADS, dim: int = DIM, window: int = WINDOW) -> list:
    """Everything but the entries, which both sides take in a form of their own."""
    return [
        random.normal(batch.num_tokens, heads, dim, scale=2.0),
        random.normal(batch.num_tokens, dim),
        batch,
        random.normal(len(batch.query_lens) + 1, 2, window, dim),
        1,
        window,
        random.wide(heads),
        dim**-0.5,
        *angles(batch.positions, HALF if dim == DIM else dim // 4),
    ]


def _selected(random: Random, batch: ForwardBatch, count: int) -> torch.Tensor:
    selected = torch.full((batch.num_tokens, count), -1, dtype=torch.int32)
    for row, position in enumerate(batch.positions.tolist()):
        chosen = random.permutation((position + 1) // RATIO)[:count].sort().values
        selected[row, : len(chosen)] = chosen
    return selected


@pytest.fixture
def two_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few programs as show that parts are added: the interpreter runs them one after another."""
    monkeypatch.setattr(gpu, "num_splits", lambda num_programs, num_tiles: 2)


@pytest.mark.usefixtures("two_splits")
def test_tokens_of_a_step_see_the_ring_the_step_and_all_closed_entries(dtype: torch.dtype) -> None:
    """Small heads; the start, rows that wrap around in the ring, several tokens of a sequence."""
    random = Random(dtype)
    batch = make_batch(random, [(0, 1), (41, 2), (9, 0)], block_size=16)
    case = _case(random, batch, heads=4, dim=32, window=12)
    cache = random.normal(num_blocks(batch), 2, 16 // RATIO, 32)
    found = gpu.attention(*case, Pages(cache, 1), RATIO)
    assert_close(found, shared_kv_attention.attention_reference(*case, Entries(cache, 1, RATIO)), dtype, factor=2)


@pytest.mark.slow
@pytest.mark.usefixtures("two_splits")
def test_window_alone(dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, [(300, 1), (5, 1)], BLOCK)
    case = _case(random, batch, heads=16)
    assert_close(gpu.attention(*case, None), shared_kv_attention.attention_reference(*case, None), dtype, factor=2)


@pytest.mark.slow
@pytest.mark.usefixtures("two_splits")
def test_window_and_selected_entries_at_the_published_sizes(dtype: torch.dtype) -> None:
    random = Random(dtype)
    batch = make_batch(random, [(200, 1)], BLOCK)
    case, selected = _case(random, batch), _selected(random, batch, 40)
    cache = random.normal(num_blocks(batch), 2, BLOCK // RATIO, DIM)
    expected = shared_kv_attention.attention_reference(*case, Entries(cache, 1, RATIO, selected))
    assert_close(gpu.attention(*case, Pages(cache, 1), RATIO, selected), expected, dtype, factor=2)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_however_the_keys_are_split(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may have no key that a query sees."""
    random = Random(torch.float32)
    batch = make_batch(random, [(150, 1)], block_size=16)
    case, selected = _case(random, batch, heads=4, dim=32, window=40), _selected(random, batch, 70)
    cache = random.normal(num_blocks(batch), 2, 16 // RATIO, 32)
    monkeypatch.setattr(gpu, "num_splits", lambda num_programs, num_tiles: splits)
    expected = shared_kv_attention.attention_reference(*case, Entries(cache, 1, RATIO, selected))
    assert_close(gpu.attention(*case, Pages(cache, 1), RATIO, selected), expected, torch.float32)


def test_a_small_step_is_split_and_a_large_one_is_not() -> None:
    assert launch.num_splits(num_programs=4, num_tiles=20) == 20
    assert launch.num_splits(num_programs=32, num_tiles=20) == 8
    assert launch.num_splits(num_programs=1000, num_tiles=20) == 1
    assert launch.num_splits(num_programs=0, num_tiles=0) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("two_splits")
@pytest.mark.parametrize("record", [KV_584, KV_528, KV_288], ids=lambda record: record.name)
def test_packed_entries_are_attended_as_what_they_decode_to(record: RecordFormat) -> None:
    random = Random(torch.float32)
    batch = make_batch(random, [(150, 1)], block_size=64)
    case, per_page = _case(random, batch, heads=16), 64 // RATIO
    pages = Pages(torch.zeros(num_blocks(batch), 2, per_page * record.record_bytes, dtype=torch.uint8), 1, record)
    entries = torch.arange(151 // RATIO)
    scatter_entries_reference(
        random.normal(len(entries), DIM), pages, batch.block_tables, torch.zeros_like(entries), entries
    )
    plain = plain_rows(pages).unsqueeze(1).repeat(1, 2, 1, 1)
    expected = shared_kv_attention.attention_reference(*case, Entries(plain, 1, RATIO))
    assert_close(gpu.attention(*case, pages, RATIO), expected, torch.float32)


def test_what_does_not_fit_is_refused() -> None:
    random = Random(torch.float32)
    batch = make_batch(random, [(3, 1)], block_size=16)
    with pytest.raises(ValueError, match="heads of 24 are no power of two"):
        gpu.attention(*_case(random, batch, heads=2, dim=24, window=4), None)
    case = _case(random, batch, heads=2, dim=32, window=4)
    with pytest.raises(ValueError, match=r"ring of 7\+ rows"):
        gpu.attention(*case[:5], 8, *case[6:], None)
