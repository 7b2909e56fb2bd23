"""Rounding to records: the compiled kernel equals its reference to the bit, and that the formats' definitions."""

from __future__ import annotations

import pytest
import torch
from tests.reference.rounding import fp8, mxfp4, nvfp4

from headrace_engine import kernels as ops
from headrace_engine.kernels.cases import Random
from headrace_engine.kernels.records import (
    encode,
    read_records_reference,
    round_to_records_reference,
    write_records_reference,
)
from headrace_engine.kv import records
from headrace_engine.kv.records import RecordFormat

FORMATS = [*records.FORMATS, records.activations(100, 32), records.fp8_beside_rope(40, 8), records.nvfp4(24)]
by_name = pytest.mark.parametrize("record", FORMATS, ids=lambda record: record.name)


def hard_rows(random: Random, dim: int) -> torch.Tensor:
    """[8, dim]: many magnitudes, ties, zeros of both signs, the largest numbers, and blocks of which all is tiny."""
    rows = random.wide(8, dim) * 2.0 ** random.integers(-12, 13, 8, dim)
    rows[1] = torch.arange(dim) / 8 - 3
    rows[2] = 0.0
    rows[3, ::2] = -0.0
    rows[4] = 3e38
    rows[5] = 1e-30
    rows[6] = 2.0**-9 * torch.arange(dim)
    return rows.to(random.dtype)


@by_name
@pytest.mark.usefixtures("kernels")
def test_the_kernel_gives_the_reference_to_the_bit(record: RecordFormat, dtype: torch.dtype) -> None:
    rows = hard_rows(Random(dtype), record.dim)
    given = rows.clone()
    rounded, expected = ops.round_to_records(rows, record), round_to_records_reference(rows, record)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(rounded.view(bits), expected.view(bits))
    assert torch.equal(rows, given)


@pytest.mark.usefixtures("kernels")
def test_leading_axes_are_kept() -> None:
    rows, record = torch.randn(2, 3, 128), records.INDEX_68
    assert torch.equal(ops.round_to_records(rows, record)[1, 2], ops.round_to_records(rows[1, 2:], record)[0])
    assert ops.round_to_records(rows[:0], record).shape == (0, 3, 128)


@by_name
def test_no_rows_are_fine(record: RecordFormat) -> None:
    assert round_to_records_reference(torch.empty(0, record.dim), record).shape == (0, record.dim)


@by_name
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.usefixtures("kernels")
def test_what_is_not_finite_is_not_lost(record: RecordFormat, broken: float) -> None:
    """All of its block is NaN then, nothing of another."""
    rows = torch.ones(2, record.dim)
    rows[0, 1] = broken
    rounded = ops.round_to_records(rows, record)
    size = min(record.block, record.quantized_dim)
    assert bool(rounded[0, :size].isnan().all())
    assert bool(rounded[0, size:].isfinite().all())
    assert bool(rounded[1].isfinite().all())


def definition(rows: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    match record.kind:
        case "mxfp4":
            return mxfp4(rows)
        case "nvfp4":
            return nvfp4(rows)
    rotary = rows[:, record.quantized_dim :].bfloat16().float()
    return torch.cat([fp8(rows[:, : record.quantized_dim], record.block), rotary], dim=1)


@by_name
def test_the_reference_gives_the_numbers_of_the_definition(record: RecordFormat) -> None:
    if record is records.INDEX_132:
        pytest.skip("its scale is no number of a table")
    rows = hard_rows(Random(torch.float32), record.dim)
    assert torch.equal(round_to_records_reference(rows, record), definition(rows, record))


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="nvfp4-288 has 512 elements, not 128"):
        ops.round_to_records(torch.ones(1, 128), records.KV_288)


def test_a_format_that_ends_within_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="15 elements do not fill whole bytes"):
        records.mxfp4(15)


@by_name
@pytest.mark.usefixtures("kernels")
def test_pages_are_written_and_read_as_the_reference_does(record: RecordFormat, dtype: torch.dtype) -> None:
    """Pages of 3 entries in items of 2 layers; what is not written stays."""
    rows, layer = hard_rows(Random(dtype), record.dim), 1
    items, numbers = torch.tensor([4, 0, 0, 2, 5, 5, 5, 1]), torch.tensor([2, 0, 1, 0, 2, 0, 1, 1])
    pages = torch.full((6, 2, 3 * record.record_bytes), 7, dtype=torch.uint8)
    expected = pages.clone()
    write_records_reference(rows, expected, layer, items, numbers, record)
    ops.write_records(rows, pages, layer, items, numbers, record)
    assert torch.equal(pages, expected)
    assert bool((pages[:, 0] == 7).all())
    assert bool((pages[3] == 7).all())
    read = ops.read_records(pages, layer, items, numbers, record, dtype)
    assert torch.equal(read, round_to_records_reference(rows, record))
    assert torch.equal(read, read_records_reference(pages, layer, items, numbers, record, dtype))


def test_a_page_has_the_elements_of_all_its_entries_then_their_scales() -> None:
    record, rows = records.KV_288, torch.randn(2, 512)
    pages = torch.zeros(1, 1, 2 * record.record_bytes, dtype=torch.uint8)
    write_records_reference(rows, pages, 0, torch.tensor([0, 0]), torch.tensor([0, 1]), record)
    values, scales = encode(rows, record)
    assert torch.equal(pages[0, 0], torch.cat([values.flatten(), scales.flatten()]))


def test_pages_that_do_not_fit_are_refused() -> None:
    rows, one, record = torch.ones(1, 128), torch.zeros(1, dtype=torch.int64), records.INDEX_68
    pages = torch.zeros(2, 1, 68, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no whole number of mxfp4-68 records"):
        ops.write_records(rows, pages[:, :, :60].contiguous(), 0, one, one, record)
    with pytest.raises(ValueError, match="have no layer 1"):
        ops.write_records(rows, pages, 1, one, one, record)
    with pytest.raises(ValueError, match="int64 of one length"):
        ops.write_records(rows, pages, 0, one.int(), one, record)
