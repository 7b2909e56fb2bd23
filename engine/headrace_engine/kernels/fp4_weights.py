"""Experts' weights kept in FP4, as checkpoints store them: a quarter of the memory of bf16, and of what a step reads.

The numbers are the same: an e2m1 times a power of two is exact in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace_engine.kernels.dequantize import dequantize_fp4
from headrace_engine.kernels.native import library_for
from headrace_engine.kernels.weights import TILE, packs
from headrace_engine.models.quantize import FP4_ROW

_NAN_SCALE = 255
_WORD_BYTES = 4  # eight inputs of an output, which stay together


@dataclass(frozen=True)
class Fp4Weight:
    """Weights [E, n, k] for bf16 rows, packed as csrc/packed_fp4.h reads them, kept under the shapes of a checkpoint.

    codes [E, n, k / 2] uint8: [E, n / 16, k / 8, 16, 4]; scales [E, n, k / 32] uint8: [E, n / 16, k / 32, 16].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    packed: ClassVar[bool] = True

    @property
    def shape(self) -> torch.Size:
        *lead, half = self.codes.shape
        return torch.Size((*lead, 2 * half))

    def plain(self) -> torch.Tensor:
        """The numbers [E, n, k] as bf16."""
        out = torch.empty(self.shape, dtype=torch.bfloat16)
        for codes, scales, matrix in zip(self.codes, self.scales, out, strict=True):
            exponents = _rows(scales, 1).view(torch.float8_e8m0fnu)
            dequantize_fp4(_rows(codes, _WORD_BYTES), exponents.float(), matrix)
        return out


class Fp4Stack:
    """An Fp4Weight [E, n, k] in the making; heights: rows of the parts that [n, k] consists of, one under the other."""

    def __init__(self, num_experts: int, heights: Sequence[int], depth: int) -> None:
        num_rows = sum(heights)
        self._codes = torch.empty((num_experts, num_rows, depth // 2), dtype=torch.uint8)
        self._scales = torch.empty((num_experts, num_rows, depth // FP4_ROW), dtype=torch.uint8)
        self._heights = tuple(heights)

    @staticmethod
    def fits(device: str, dtype: torch.dtype, heights: Sequence[int], depth: int) -> bool:
        """Whether there is a kernel for weights of these sizes and rows of this dtype."""
        is_packable = depth % FP4_ROW == 0 and all(height % TILE == 0 for height in heights)
        return device == "cpu" and is_packable and packs(dtype)

    def write(self, expert: int, part: int, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """codes int8 or uint8 [height, k / 2] and scale e8m0 [height, k / 32] of one part. Raises ValueError."""
        first, height = sum(self._heights[:part]), self._heights[part]
        rows = slice(first, first + height)
        packed_codes, packed_scales = self._codes[expert, rows], self._scales[expert, rows]
        codes, scale = codes.view(torch.uint8).contiguous(), scale.view(torch.uint8).contiguous()
        if codes.shape != packed_codes.shape or scale.shape != packed_scales.shape:
            raise ValueError(f"scales {list(scale.shape)} do not fit packed weights {list(codes.shape)}")
        if scale.numel() and int(scale.max()) == _NAN_SCALE:
            raise ValueError("a scale is not a finite number")
        library = library_for(torch.empty(0, dtype=torch.bfloat16))
        assert library is not None  # as `fits` found
        num_tiles = height // TILE
        library.headrace_pack(codes.data_ptr(), num_tiles, codes.shape[1] // _WORD_BYTES, packed_codes.data_ptr())
        library.headrace_pack_bytes(scale.data_ptr(), num_tiles, scale.shape[1], packed_scales.data_ptr())

    def weight(self) -> Fp4Weight:
        return Fp4Weight(self._codes, self._scales)


def _rows(tiles: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """Packed [n, width] bytes, in units of one output's that stay together, back in the order of the rows."""
    n, width = tiles.shape
    units = tiles.view(n // TILE, width // unit_bytes, TILE, unit_bytes)
    return units.transpose(1, 2).reshape(n, width)
