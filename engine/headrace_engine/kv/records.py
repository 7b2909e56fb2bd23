"""Cache records: the number formats in which DeepSeek's models were trained to keep key/values and index keys.

An entry's elements are numbers of 8 or 4 bits with one scale for each block of them; some formats leave the rotary dims
in bfloat16. A page holds the elements of all its entries, then their scales: entries are not interleaved. Conversions:
`kernels.records`. No torch here.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass


class Element(enum.Enum):
    E4M3 = 8  # value: bits
    E2M1 = 4

    @property
    def largest(self) -> float:
        return 448.0 if self is Element.E4M3 else 6.0


class Scale(enum.Enum):
    UE8M0 = "ue8m0"  # a power of two, rounded up so that nothing saturates
    E4M3 = "e4m3"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Scale.FP32 else 1


@dataclass(frozen=True)
class RecordFormat:
    """One format of an entry of `dim` elements, the last `plain_dim` of them in bfloat16.

    Elements round to nearest, ties to even; what a scale that is rounded down cannot reach saturates. A block with a
    number that is not finite gets a scale that is NaN, and so is all of it when it is read back.
    """

    kind: str
    dim: int
    element: Element
    block: int  # elements that share a scale; the last block may be shorter
    scale: Scale
    plain_dim: int = 0
    padding_bytes: int = 0  # behind the scales
    smallest: float = 1e-4  # largest magnitudes of a block below this count as this

    def __post_init__(self) -> None:
        if self.quantized_dim < 1 or self.quantized_dim * self.element.value % 8:
            raise ValueError(f"{self.kind} records: {self.quantized_dim} elements do not fill whole bytes")

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.record_bytes}"

    @property
    def quantized_dim(self) -> int:
        return self.dim - self.plain_dim

    @property
    def num_scales(self) -> int:
        return math.ceil(self.quantized_dim / self.block)

    @property
    def value_bytes(self) -> int:
        return self.quantized_dim * self.element.value // 8 + 2 * self.plain_dim

    @property
    def scale_bytes(self) -> int:
        return self.num_scales * self.scale.num_bytes + self.padding_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of an entry, its share of the page."""
        return self.value_bytes + self.scale_bytes


def fp8_beside_rope(dim: int, rope_dim: int) -> RecordFormat:
    """DeepSeek-V4's key/values; 584 bytes for 512 dims of which 64 are rotary. Scales are padded to 8 bytes."""
    num_scales = math.ceil((dim - rope_dim) / 64)
    padding_bytes = -num_scales % 8
    return RecordFormat("fp8", dim, Element.E4M3, 64, Scale.UE8M0, plain_dim=rope_dim, padding_bytes=padding_bytes)


def mxfp8(dim: int) -> RecordFormat:
    """DeepSeek-V4.1's key/values of the window; 528 bytes for 512 dims."""
    return RecordFormat("mxfp8", dim, Element.E4M3, 32, Scale.UE8M0)


def nvfp4(dim: int) -> RecordFormat:
    """DeepSeek-V4.1's compressed key/values; 288 bytes for 512 dims."""
    return RecordFormat("nvfp4", dim, Element.E2M1, 16, Scale.E4M3, smallest=6 * 2.0**-9)


def mxfp4(dim: int) -> RecordFormat:
    """Index keys of both; 68 bytes for 128 dims."""
    return RecordFormat("mxfp4", dim, Element.E2M1, 32, Scale.UE8M0, smallest=6 * 2.0**-126)


def fp8_index(dim: int) -> RecordFormat:
    """Index keys where 4 bits are too few; 132 bytes for 128 dims."""
    return RecordFormat("fp8", dim, Element.E4M3, 128, Scale.FP32)


@functools.cache
def activations(dim: int, block: int) -> RecordFormat:
    """What a product with FP8 or FP4 weights reads: e4m3 numbers, a power of two for each `block`. Never stored."""
    return RecordFormat("activations", dim, Element.E4M3, block, Scale.UE8M0)


KV_584, KV_528, KV_288 = fp8_beside_rope(512, 64), mxfp8(512), nvfp4(512)
INDEX_132, INDEX_68 = fp8_index(128), mxfp4(128)
FORMATS = (KV_584, KV_528, KV_288, INDEX_132, INDEX_68)


PACKED_CACHES = ("fp8", "fp4")  # cache dtypes that stand for packed records; which ones is each family's to say


@dataclass(frozen=True)
class CacheRecords:
    """The formats of a model's cache, by what an entry is."""

    window: RecordFormat
    compressed: RecordFormat
    index_key: RecordFormat
