"""Packed cache records: the formats in which published engines keep DeepSeek's key/values and index keys.

An entry's elements are numbers of 8 or 4 bits with one scale for each block of them; some formats leave the rotary
dims in bfloat16. A page holds the elements of all its entries, then their scales: entries are not interleaved.

This engine computes with plain cache entries. The formats are what `headrace-engine describe` counts with.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Element(enum.Enum):
    E4M3 = 8  # value: bits
    E2M1 = 4


class Scale(enum.Enum):
    UE8M0 = "ue8m0"  # a power of two, rounded up so that nothing saturates
    E4M3 = "e4m3"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Scale.FP32 else 1


@dataclass(frozen=True)
class RecordFormat:
    """One format of an entry of `dim` elements, the last `plain_dim` of them in bfloat16."""

    name: str
    dim: int
    element: Element
    block: int  # elements that share a scale
    scale: Scale
    plain_dim: int = 0
    padding_bytes: int = 0  # behind the scales
    smallest: float = 1e-4  # largest magnitudes of a block below this count as this

    @property
    def num_scales(self) -> int:
        return (self.dim - self.plain_dim) // self.block

    @property
    def value_bytes(self) -> int:
        return (self.dim - self.plain_dim) * self.element.value // 8 + 2 * self.plain_dim

    @property
    def scale_bytes(self) -> int:
        return self.num_scales * self.scale.num_bytes + self.padding_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of an entry, its share of the page."""
        return self.value_bytes + self.scale_bytes


KV_584 = RecordFormat("fp8-584", 512, Element.E4M3, 64, Scale.UE8M0, plain_dim=64, padding_bytes=1)
KV_528 = RecordFormat("mxfp8-528", 512, Element.E4M3, 32, Scale.UE8M0)
KV_288 = RecordFormat("nvfp4-288", 512, Element.E2M1, 16, Scale.E4M3, smallest=6 * 2.0**-9)
INDEX_132 = RecordFormat("fp8-132", 128, Element.E4M3, 128, Scale.FP32)
INDEX_68 = RecordFormat("mxfp4-68", 128, Element.E2M1, 32, Scale.UE8M0, smallest=6 * 2.0**-126)
FORMATS = (KV_584, KV_528, KV_288, INDEX_132, INDEX_68)

_LARGEST = {Element.E4M3: 448.0, Element.E2M1: 6.0}


def encode_page(entries: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    """entries [n, dim] fp32 or bfloat16 -> a page [n * record_bytes] uint8, every byte of it decided by the entries.

    Elements round to nearest, ties to even; what a scale that is rounded down cannot reach saturates.
    """
    import torch

    num_entries, quantized_dim = entries.shape[0], record.dim - record.plain_dim
    blocks = entries[:, :quantized_dim].float().view(num_entries, record.num_scales, record.block)
    largest = _LARGEST[record.element]
    stored_scales, factors = _scales(blocks.abs().amax(-1).clamp(min=record.smallest) / largest, record.scale)
    scaled = (blocks / factors.unsqueeze(-1)).clamp(-largest, largest).view(num_entries, quantized_dim)
    if record.element is Element.E4M3:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        halves = _fp4_codes(scaled)
        codes = halves[:, 0::2] | (halves[:, 1::2] << 4)
    plain = entries[:, quantized_dim:].to(torch.bfloat16).contiguous().view(torch.uint8).view(num_entries, -1)
    padding = stored_scales.new_zeros((num_entries, record.padding_bytes))
    values = torch.cat([codes, plain], dim=1)
    return torch.cat([values.flatten(), torch.cat([stored_scales, padding], dim=1).flatten()])


def decode_page(page: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    """A page [n * record_bytes] uint8 -> its entries [n, dim] fp32."""
    import torch

    num_entries = page.numel() // record.record_bytes
    values, scales = torch.split(page, [num_entries * record.value_bytes, num_entries * record.scale_bytes])
    values = values.view(num_entries, record.value_bytes)
    scales = scales.view(num_entries, record.scale_bytes)[:, : record.scale_bytes - record.padding_bytes]
    factors = _factors(scales.contiguous(), record.scale)
    codes, plain = torch.split(values, [record.value_bytes - 2 * record.plain_dim, 2 * record.plain_dim], dim=1)
    if record.element is Element.E4M3:
        numbers = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        numbers = _fp4_values()[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    numbers = numbers.view(num_entries, record.num_scales, record.block) * factors.unsqueeze(-1)
    return torch.cat([numbers.flatten(1), plain.contiguous().view(torch.bfloat16).float()], dim=1)


def _scales(wanted: torch.Tensor, scale: Scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [n, blocks] > 0 fp32 -> their bytes [n, bytes] uint8, and what those mean, [n, blocks] fp32."""
    import torch

    match scale:
        case Scale.UE8M0:
            fraction, exponents = torch.frexp(wanted)
            stored = (exponents - (fraction == 0.5).int() + 127).to(torch.uint8)
        case Scale.E4M3:
            stored = wanted.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        case Scale.FP32:
            stored = wanted.contiguous().view(torch.uint8)
    return stored, _factors(stored, scale)


def _factors(stored: torch.Tensor, scale: Scale) -> torch.Tensor:
    import torch

    types = {Scale.UE8M0: torch.float8_e8m0fnu, Scale.E4M3: torch.float8_e4m3fn, Scale.FP32: torch.float32}
    return stored.view(types[scale]).float()


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes of e2m1, 0 to 15, uint8: nearest, of two equally near ones the even one."""
    import torch

    magnitudes = values.abs()
    table = _fp4_values()[:8]
    middles = (table[1:] + table[:-1]) / 2
    index = torch.bucketize(magnitudes, middles)
    is_tie = (index < len(middles)) & (magnitudes == middles[index.clamp(max=len(middles) - 1)])
    index += is_tie & (index % 2 == 1)
    return (index + 8 * values.signbit()).to(torch.uint8)


@functools.cache
def _fp4_values() -> torch.Tensor:
    """[16] fp32, by code; the upper half is the negative one."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return torch.cat([values, -values])
