"""Packed cache records: their sizes, their bytes at known places, and what a round trip keeps."""

from __future__ import annotations

import struct

import pytest
import torch

from headrace_engine.kernels import records
from headrace_engine.kv.records import FORMATS, INDEX_68, INDEX_132, KV_288, KV_528, KV_584, RecordFormat


def encode(entries: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    """A page."""
    values, scales = records.encode(entries, record)
    return torch.cat([values.flatten(), scales.flatten()])


def decode(page: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    num_entries = len(page) // record.record_bytes
    values, scales = page.split([num_entries * record.value_bytes, num_entries * record.scale_bytes])
    return records.decode(values.view(num_entries, -1), scales.view(num_entries, -1), record)


by_name = pytest.mark.parametrize("record", FORMATS, ids=lambda record: record.name)


def random_entries(record: RecordFormat, num_entries: int = 5) -> torch.Tensor:
    """Magnitudes from 2^-6 to 2^6, a block of zeros, and both zeros."""
    generator = torch.Generator().manual_seed(record.record_bytes)
    exponents = torch.randint(-6, 7, (num_entries, record.dim // 16), generator=generator).repeat_interleave(16, 1)
    entries = torch.randn((num_entries, record.dim), generator=generator) * 2.0**exponents
    entries[0, : record.block] = 0.0
    entries[1, 0], entries[1, 1] = 0.0, -0.0
    return entries


@pytest.mark.parametrize(
    ("record", "sizes"),
    [
        (KV_584, (448 + 2 * 64, 7 + 1, 584)),
        (KV_528, (512, 16, 528)),
        (KV_288, (256, 32, 288)),
        (INDEX_132, (128, 4, 132)),
        (INDEX_68, (64, 4, 68)),
    ],
)
def test_sizes(record: RecordFormat, sizes: tuple[int, int, int]) -> None:
    assert (record.value_bytes, record.scale_bytes, record.record_bytes) == sizes
    assert encode(random_entries(record, 3), record).shape == (3 * record.record_bytes,)


@by_name
def test_a_round_trip_is_within_half_a_step_of_the_largest_of_a_block(record: RecordFormat) -> None:
    entries = random_entries(record)
    back = decode(encode(entries, record), record)
    quantized = record.dim - record.plain_dim
    blocks, errors = (x[:, :quantized].reshape(len(x), -1, record.block) for x in (entries, back - entries))
    largest = blocks.abs().amax(-1, keepdim=True)
    # A step at the top of the range is 2 of 6 for e2m1 and 32 of 448 for e4m3; a scale rounded up can double it, and
    # one rounded down to e4m3 by a sixteenth cuts off as much.
    step = 2 / 6 if record.element.value == 4 else 32 / 448
    assert bool((errors.abs() <= largest * (step / 2 * 2 + 1 / 16) + record.smallest).all())
    assert torch.equal(back[:, quantized:], entries[:, quantized:].to(torch.bfloat16).float())
    assert not back[0, : record.block].any()


@by_name
def test_what_has_been_packed_once_packs_to_the_same_values(record: RecordFormat) -> None:
    once = decode(encode(random_entries(record), record), record)
    twice = decode(encode(once, record), record)
    tolerance = 1e-6 if record is INDEX_132 else 0.0  # its scale is no power of two and rounds
    assert bool(((twice - once).abs() <= tolerance * once.abs()).all())


@by_name
def test_elements_of_a_page_come_first_then_scales_entry_by_entry(record: RecordFormat) -> None:
    entries = random_entries(record, 4)
    page = encode(entries, record)
    values = page[: 4 * record.value_bytes].view(4, -1)
    scales = page[4 * record.value_bytes :].view(4, -1)
    for row in range(4):
        alone = encode(entries[row : row + 1], record)
        assert torch.equal(torch.cat([values[row], scales[row]]), alone)


def test_bytes_of_584() -> None:
    """Block 1 reaches 900: its scale is the power of two from 900 / 448 up, 4. Dims from 448 on are bfloat16."""
    entries = torch.zeros(1, 512)
    entries[0, 64], entries[0, 65], entries[0, 511] = 900.0, -4.0, 1.5
    record = bytes(encode(entries, KV_584).tolist())
    assert record[64] == 0x76  # 225 is nearest to 224 = 1.75 * 2^7
    assert record[65] == 0xB8  # -1
    assert record[448 + 2 * 63 : 576] == struct.pack("<H", 0x3FC0)
    assert list(record[576:]) == [127 - 22, 127 + 2, *[127 - 22] * 5, 0]  # 1e-4 / 448 is below 2^-22


def test_bytes_of_528() -> None:
    entries = torch.zeros(1, 512)
    entries[0, 32:34] = torch.tensor([448.0, 0.5])
    record = bytes(encode(entries, KV_528).tolist())
    assert (record[32], record[33]) == (0x7E, 0x30)
    assert record[512 + 1] == 127


def test_bytes_of_288() -> None:
    """Block 1 reaches 12: its scale is 2, in e4m3. Even elements are in the low half of a byte."""
    entries = torch.zeros(1, 512)
    entries[0, 16:19] = torch.tensor([12.0, -1.0, 5.0])
    record = bytes(encode(entries, KV_288).tolist())
    assert record[8] == 0x97  # 6, and -0.5 above it
    assert record[9] == 0x04  # 2.5 ties to 2
    assert record[256 + 1] == 0x40
    assert record[256] == 0x01  # the smallest e4m3, 2^-9


def test_a_scale_of_288_ends_at_448() -> None:
    assert float(decode(encode(torch.full((1, 512), 3000.0), KV_288), KV_288).max()) == 6 * 448


def test_bytes_of_132() -> None:
    entries = torch.zeros(1, 128)
    entries[0, :2] = torch.tensor([1.0, -0.5])
    record = bytes(encode(entries, INDEX_132).tolist())
    assert (record[0], record[1]) == (0x7E, 0xF6)  # 448 and -224
    assert struct.unpack("<f", record[128:]) == (pytest.approx(1 / 448),)


def test_bytes_of_68() -> None:
    entries = torch.zeros(1, 128)
    entries[0, 32:34] = torch.tensor([6.5, -2.0])
    record = bytes(encode(entries, INDEX_68).tolist())
    assert record[16] == 0xA5  # the scale is 2: 3.25 goes to 3, -1 above it
    assert list(record[64:]) == [1, 128, 1, 1]  # 2^-126 where there is nothing
