"""The published number formats and how they are written: bfloat16, FP8 with block scales, FP4 rows. No torch here.

FP8 is e4m3 (OCP 8-bit floating point, 1.0): 1 sign bit, 4 exponent bits of bias 7, 3 of mantissa; largest 448, and
0x7F is NaN. FP4 is e2m1 (OCP microscaling formats, 1.0). A scale in ue8m0 is one byte e and means 2^(e - 127).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FP8_ROW_BLOCK = (1, 32)
FP8_BLOCKS = ((128, 128), (32, 32), FP8_ROW_BLOCK)  # DeepSeek-V4's, V4.1's, and the rows of V4.1's n-gram tables
FP4_ROW = 32  # elements of a row that share one scale
_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)  # by code; the next bit is the sign
_FP8_CODES = np.arange(0x7F)
_FP8_VALUES = np.where(
    _FP8_CODES < 8, _FP8_CODES / 8 * 2.0**-6, (1 + _FP8_CODES % 8 / 8) * 2.0 ** (_FP8_CODES // 8 - 7.0)
).astype(np.float32)


def fp8_block(shape: Sequence[int], scale_shape: Sequence[int]) -> tuple[int, int] | None:
    """(rows, columns) of a weight that share a scale, from the two shapes; None: the shapes do not fit.

    Never ambiguous: where two block sizes give the same scale shape, the whole weight fits into one block of either.
    """
    if len(shape) != 2 or len(scale_shape) != 2:
        return None
    for rows, columns in FP8_BLOCKS:
        if tuple(scale_shape) == (-(-shape[0] // rows), -(-shape[1] // columns)):
            return rows, columns
    return None


def bfloat16_bits(values: Array) -> Array:
    """uint16 bits of finite fp32 values rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def fp8_codes(values: Array) -> Array:
    """e4m3 bytes (uint8) of fp32 values: nearest, ties to even, saturating at 448."""
    return _nearest(values, _FP8_VALUES, sign_bit=7)


def fp4_codes(values: Array) -> Array:
    """e2m1 codes (uint8, 0 to 15) of fp32 values: nearest, ties to even, saturating at 6."""
    return _nearest(values, _FP4_VALUES, sign_bit=3)


def quantize_fp8(values: Array, block: tuple[int, int]) -> tuple[Array, Array]:
    """values [rows, columns] fp32 to e4m3 bytes of the same shape and ue8m0 scales, one for each block.

    Scales are [ceil(rows / block_rows), ceil(columns / block_columns)] uint8; the last blocks may be partial. The scale
    is the smallest power of two that brings a block's largest magnitude to 448 or less.
    """
    rows, columns = values.shape
    padded = np.pad(values, ((0, -rows % block[0]), (0, -columns % block[1])))
    blocks = padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    exponents = _exponents(np.abs(blocks).max(axis=(1, 3)), largest=448.0, smallest=1e-4)
    codes = fp8_codes(np.ldexp(blocks, -exponents[:, None, :, None])).reshape(padded.shape)
    return np.ascontiguousarray(codes[:rows, :columns]), (exponents + 127).astype(np.uint8)


def quantize_fp4(values: Array) -> tuple[Array, Array]:
    """values [rows, columns] fp32 to packed e2m1 [rows, columns / 2] uint8 and ue8m0 scales [rows, columns / 32].

    Byte j of a row holds element 2 j in its low half and 2 j + 1 in its high half. Columns are a multiple of 32.
    """
    rows, columns = values.shape
    groups = values.reshape(rows, columns // FP4_ROW, FP4_ROW)
    exponents = _exponents(np.abs(groups).max(axis=-1), largest=6.0, smallest=6 * 2.0**-126)
    codes = fp4_codes(np.ldexp(groups, -exponents[:, :, None])).reshape(rows, columns)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), (exponents + 127).astype(np.uint8)


def _exponents(magnitudes: Array, *, largest: float, smallest: float) -> Array:
    """ceil(log2(magnitude / largest)) of each block, exact at powers of two."""
    fraction, exponents = np.frexp(np.maximum(magnitudes, np.float32(smallest)) / np.float32(largest))
    exact: Array = exponents - (fraction == 0.5)
    return exact


def _nearest(values: Array, codes: Array, *, sign_bit: int) -> Array:
    """Index (uint8) of the nearest of the ascending magnitudes `codes`, of two the even one; and the sign's bit."""
    magnitudes = np.abs(values)
    middles = (codes[1:] + codes[:-1]) / 2
    index = np.searchsorted(middles, magnitudes, side="left")
    is_tie = magnitudes == np.append(middles, np.inf)[index]
    nearest: Array = (index + (is_tie & (index % 2 == 1)) + (np.signbit(values) * (1 << sign_bit))).astype(np.uint8)
    return nearest
