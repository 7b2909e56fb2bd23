"""Gathering and scattering entries: plain rows and every packed record, at their real sizes."""

from __future__ import annotations

import pytest
import torch

from headrace_engine.kernels.cases import Random
from headrace_engine.kernels.gpu import pages as gpu
from headrace_engine.kernels.gpu.records import Pages
from headrace_engine.kv.records import FORMATS, KV_288, KV_584, RecordFormat

PER_PAGE = 4
ALWAYS = (KV_584, KV_288)  # both sizes of elements, two kinds of scales, elements that stay plain
formats = pytest.mark.parametrize(
    "record",
    [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.slow, id=each.name) for each in FORMATS],
)


def _tables(random: Random) -> torch.Tensor:
    """Two sequences of three blocks each."""
    return random.permutation(6).view(2, 3).to(torch.int32)


def _empty(record: RecordFormat | None, dim: int, dtype: torch.dtype) -> Pages:
    """Six blocks of layer 1 of two, filled with something that nobody should read as an entry."""
    if record is None:
        return Pages(torch.full((6, 2, PER_PAGE, dim), torch.nan, dtype=dtype), 1)
    return Pages(torch.full((6, 2, PER_PAGE * record.record_bytes), 0xAB, dtype=torch.uint8), 1, record)


def _asked() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and entries: of both sequences, in no order, over page borders, one that is left out."""
    return torch.tensor([0, 1, 1, 0, 0, 1]), torch.tensor([3, 4, 11, -1, 0, 7])


@formats
def test_packed_entries_are_written_byte_for_byte_as_pages_are_encoded(record: RecordFormat) -> None:
    random = Random(torch.bfloat16)
    tables, (sequences, entries) = _tables(random), _asked()
    rows = random.normal(len(entries), record.dim) * torch.tensor([1.0, 1e-3, 300.0, 1.0, 0.0, 1e-6]).unsqueeze(1)
    actual, expected = _empty(record, 0, rows.dtype), _empty(record, 0, rows.dtype)
    gpu.scatter_entries(rows.bfloat16(), actual, tables, sequences, entries)
    gpu.scatter_entries_reference(rows.bfloat16(), expected, tables, sequences, entries)
    assert torch.equal(actual.cache, expected.cache)
    assert int((actual.cache != 0xAB).any(dim=2).sum()) == 3  # pages: one layer of the blocks that entries fell into


@formats
def test_packed_entries_are_read_back_exactly(record: RecordFormat) -> None:
    random = Random(torch.float32)
    tables, (sequences, entries) = _tables(random), _asked()
    pages = _empty(record, 0, torch.float32)
    gpu.scatter_entries_reference(random.normal(len(entries), record.dim), pages, tables, sequences, entries)
    where = (pages, tables, sequences, entries, torch.float32)
    found = gpu.gather_entries(*where)
    assert torch.equal(found, gpu.gather_entries_reference(*where))
    assert not found[3].any()


def test_plain_entries_return_as_they_were_put(dtype: torch.dtype) -> None:
    random = Random(dtype)
    tables, (sequences, entries) = _tables(random), _asked()
    pages, rows = _empty(None, 512, dtype), random.normal(len(entries), 512)
    gpu.scatter_entries(rows, pages, tables, sequences, entries)
    found = gpu.gather_entries(pages, tables, sequences, entries, dtype)
    assert torch.equal(found, rows.where((entries >= 0).unsqueeze(1), 0))
    expected = _empty(None, 512, dtype)
    gpu.scatter_entries_reference(rows, expected, tables, sequences, entries)
    assert torch.equal(pages.cache.nan_to_num(7.0), expected.cache.nan_to_num(7.0))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no number of fp8-584 records"):
        Pages(torch.zeros(2, 1, 585, dtype=torch.uint8), 0, FORMATS[0])
    with pytest.raises(ValueError, match="plain rows in 4 dimensions"):
        Pages(torch.zeros(2, 1, 584, dtype=torch.uint8), 0)
    pages = Pages(torch.zeros(2, 1, 4, 32), 0)
    tables, one = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="rows must be contiguous"):
        gpu.scatter_entries(torch.zeros(2, 32), pages, tables, one, one)
    with pytest.raises(ValueError, match="contiguous int64"):
        gpu.gather_entries(pages, tables, one.int(), one, torch.float32)
