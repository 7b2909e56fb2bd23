"""Dequantization against its reference: every byte, exactly."""

from __future__ import annotations

import pytest
import torch

from headrace_engine.kernels.cases import Random
from headrace_engine.kernels.dequantize import (
    dequantize_fp4,
    dequantize_fp4_reference,
    dequantize_fp8,
    dequantize_fp8_reference,
)

pytestmark = pytest.mark.usefixtures("kernels")


def bytes_of(random: Random, rows: int, columns: int) -> torch.Tensor:
    """Every byte comes up where there is room."""
    return (
        (torch.arange(rows * columns) * 167 + random.integers(0, 256, 1)).remainder(256).to(torch.uint8).view(rows, -1)
    )


def scales_of(random: Random, rows: int, columns: int, *, are_powers: bool) -> torch.Tensor:
    if are_powers:
        return 2.0 ** random.integers(-130, 120, rows, columns).float()
    return random.wide(rows, columns)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same bits, but any NaN is a NaN."""
    nan = expected.isnan()
    integers = torch.int16 if expected.dtype is torch.bfloat16 else torch.int32
    return bool((actual.isnan() == nan).all()) and torch.equal(
        actual[~nan].view(integers), expected[~nan].view(integers)
    )


@pytest.mark.parametrize("are_powers", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 96), (40, 256)])
def test_fp4(rows: int, columns: int, are_powers: bool, dtype: torch.dtype) -> None:
    random = Random(dtype)
    packed = bytes_of(random, rows, columns // 2)
    scale = scales_of(random, rows, columns // 32, are_powers=are_powers)
    actual, expected = torch.empty((2, rows, columns), dtype=dtype)
    dequantize_fp4(packed, scale, actual)
    dequantize_fp4_reference(packed, scale, expected)
    assert same(actual, expected)


@pytest.mark.parametrize("are_powers", [True, False])
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (33, 70), (130, 256)])
def test_fp8(rows: int, columns: int, block: tuple[int, int], are_powers: bool, dtype: torch.dtype) -> None:
    random = Random(dtype)
    codes = bytes_of(random, rows, columns).view(torch.float8_e4m3fn)
    scale = scales_of(random, -(-rows // block[0]), -(-columns // block[1]), are_powers=are_powers)
    actual, expected = torch.empty((2, rows, columns), dtype=dtype)
    dequantize_fp8(codes, scale, block, actual)
    dequantize_fp8_reference(codes, scale, block, expected)
    assert same(actual, expected)


def test_rows_apart_take_the_reference(dtype: torch.dtype) -> None:
    """A target that is a slice of wider rows is filled, and nothing beside it."""
    wide = torch.zeros((4, 40), dtype=dtype)
    dequantize_fp4(torch.full((4, 16), 0x22, dtype=torch.uint8), torch.ones(4, 1), wide[:, :32])
    assert wide[:, :32].unique().tolist() == [1.0]
    assert not wide[:, 32:].any()


def test_scales_that_do_not_fit_are_refused(dtype: torch.dtype) -> None:
    out = torch.empty((2, 64), dtype=dtype)
    with pytest.raises(ValueError, match=r"scale must be contiguous fp32 \[2, 2\]"):
        dequantize_fp4(torch.zeros((2, 32), dtype=torch.uint8), torch.ones(2, 1), out)
    with pytest.raises(ValueError, match=r"scale must be contiguous fp32 \[1, 2\]"):
        dequantize_fp8(torch.zeros((2, 64), dtype=torch.float8_e4m3fn), torch.ones(1, 1), (32, 32), out)
