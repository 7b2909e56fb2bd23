"""FP8, FP4 and their scales, against values written out from the standards' definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.models.dequantize import dequantize_into
from headrace_engine.models.quantize import (
    bfloat16_bits,
    fp4_codes,
    fp8_block,
    fp8_codes,
    quantize_fp4,
    quantize_fp8,
)

NIBBLES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def e4m3(byte: int) -> float:
    """OCP 8-bit floating point, section 5.2: one sign bit, exponent of 4 bits with bias 7, mantissa of 3 bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def fp8(weight: np.ndarray, scale: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dequantized bytes [rows, columns] with scales in ue8m0 bytes or fp32."""
    target = torch.empty(weight.shape, dtype=dtype)
    scales = torch.from_numpy(scale)
    scales = scales.view(torch.float8_e8m0fnu) if scale.dtype == np.uint8 else scales
    dequantize_into(target, torch.from_numpy(weight).view(torch.float8_e4m3fn), scales)
    return target


def fp4(packed: np.ndarray, scale: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    target = torch.empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype)
    weight, scales = torch.from_numpy(packed).view(torch.int8), torch.from_numpy(scale).view(torch.float8_e8m0fnu)
    dequantize_into(target, weight, scales)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_fp8_byte(dtype: torch.dtype) -> None:
    values = fp8(np.arange(256, dtype=np.uint8).reshape(1, 256), np.full((1, 2), 127, np.uint8), dtype)
    expected = torch.tensor([[e4m3(byte) for byte in range(256)]])
    assert torch.equal(values.float().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    assert bool(values[0, 0x80].signbit())  # minus zero stays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_fp4_byte_holds_the_even_element_in_its_low_half(dtype: torch.dtype) -> None:
    values = fp4(np.arange(256, dtype=np.uint8).reshape(16, 16), np.full((16, 1), 127, np.uint8), dtype)
    expected = [
        [half for byte in range(16 * row, 16 * row + 16) for half in (byte & 15, byte >> 4)] for row in range(16)
    ]
    assert values.float().tolist() == [[NIBBLES[code] for code in row] for row in expected]


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 254])
def test_a_ue8m0_byte_is_a_power_of_two(byte: int) -> None:
    one_and_a_half = 0x3C  # e4m3
    power = float(Fraction(2) ** (byte - 127))
    assert (
        fp8(np.full((2, 2), one_and_a_half, np.uint8), np.full((1, 1), byte, np.uint8)).unique().item() == 1.5 * power
    )
    assert fp4(np.full((2, 16), 0x33, np.uint8), np.full((2, 1), byte, np.uint8)).unique().item() == 1.5 * power


@pytest.mark.parametrize(
    ("shape", "scale_shape", "block"),
    [
        ((256, 384), (2, 3), (128, 128)),
        ((256, 384), (8, 12), (32, 32)),
        ((96, 200), (1, 2), (128, 128)),  # partial blocks at both ends
        ((96, 200), (3, 7), (32, 32)),
        ((50, 256), (50, 8), (1, 32)),
        ((256, 384), (2, 12), None),
        ((256, 384), (3, 2), None),
        ((256,), (2,), None),
    ],
)
def test_the_block_follows_from_the_shapes(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], block: tuple[int, int] | None
) -> None:
    assert fp8_block(shape, scale_shape) == block


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32)])
@pytest.mark.parametrize("is_ue8m0", [True, False], ids=["ue8m0", "fp32"])
@pytest.mark.parametrize("shape", [(130, 300), (128, 128), (33, 64), (1, 33)])
def test_each_fp8_element_takes_the_scale_of_its_block(
    shape: tuple[int, int], block: tuple[int, int], is_ue8m0: bool
) -> None:
    random = np.random.default_rng(3)
    weight = random.integers(0, 0x7F, shape).astype(np.uint8)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    scale = random.integers(100, 150, grid).astype(np.uint8)
    factors = 2.0 ** (scale.astype(np.float64) - 127) if is_ue8m0 else random.standard_normal(grid).astype(np.float32)
    values = fp8(weight, scale if is_ue8m0 else factors)
    for row, column in [(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3), (0, shape[1] - 1)]:
        exact = e4m3(int(weight[row, column])) * factors[row // block[0], column // block[1]]
        assert float(values[row, column]) == float(np.float32(exact))


def test_each_fp4_element_takes_the_scale_of_its_32() -> None:
    random = np.random.default_rng(4)
    packed = random.integers(0, 256, (300, 48)).astype(np.uint8)
    scale = random.integers(90, 160, (300, 3)).astype(np.uint8)
    values = fp4(packed, scale)
    for row, column in [(0, 0), (7, 31), (7, 32), (299, 95), (150, 63)]:
        code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
        assert float(values[row, column]) == NIBBLES[code] * 2.0 ** (int(scale[row, column // 32]) - 127)


@pytest.mark.parametrize("scale", [np.array([[255]], np.uint8), np.array([[np.inf]], np.float32)])
def test_a_scale_that_is_no_number_is_refused(scale: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a scale is not a finite number"):
        fp8(np.zeros((4, 4), np.uint8), scale)


def test_every_fp8_value_is_its_own_nearest() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert np.array_equal(fp8_codes(np.array([e4m3(int(code)) for code in codes], np.float32)), codes)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (0.26, 0.5), (5.1, 6), (9, 6), (-2.6, -3)],
)
def test_fp4_rounds_to_nearest_and_ties_to_the_even_code(value: float, rounded: float) -> None:
    assert NIBBLES[fp4_codes(np.array([value], np.float32))[0]] == rounded


@pytest.mark.parametrize("value", [17.0, 19.0, -0.0, 2.0**-10, 3 * 2.0**-10, 0.3, 500.0, 463.9, -61.7, 247.9])
def test_fp8_rounds_as_torch_does(value: float) -> None:
    expected = torch.tensor([max(-448.0, min(448.0, value))]).to(torch.float8_e4m3fn).view(torch.uint8)
    assert fp8_codes(np.array([value], np.float32))[0] == expected.item()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126), min_size=1, max_size=20)
)
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16)
    assert np.array_equal(bfloat16_bits(array), expected.numpy())


@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 448.0, 7.0])
def test_quantizing_keeps_what_the_formats_can_keep(magnitude: float) -> None:
    """Half a step of the largest value in a block for FP4 and FP8, and nothing lost the second time."""
    values = (np.random.default_rng(5).standard_normal((70, 96)) * magnitude).astype(np.float32)
    once = fp8(*quantize_fp8(values, (32, 32))).numpy()
    assert np.abs(once - values).max() <= np.abs(values).max() * 2**-4
    assert np.array_equal(fp8(*quantize_fp8(once, (32, 32))).numpy(), once)
    once = fp4(*quantize_fp4(values)).numpy()
    assert np.abs(once - values).max() <= np.abs(values).max() / 4
    assert np.array_equal(fp4(*quantize_fp4(once)).numpy(), once)
