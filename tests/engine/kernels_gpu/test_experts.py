"""Grouped products of experts on stored weights, against plain torch on what the weights mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.kernels.compare import assert_close

from headrace_engine.kernels.cases import Random
from headrace_engine.kernels.gpu import experts as gpu
from headrace_engine.kernels.gpu.experts import ROWS, Stack
from headrace_engine.models.quantize import quantize_fp4, quantize_fp8

LIMIT = 10.0
STORAGES = ["fp4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("plain", "fp8-128", "fp8-32"))]


def _stack(random: Random, storage: str, experts: int, rows: int, columns: int) -> Stack:
    values = random.wide(experts, rows, columns, scale=columns**-0.5)
    if storage == "plain":
        return Stack(values.to(random.dtype))
    if storage == "fp4":
        pairs = [quantize_fp4(each) for each in values.numpy()]
    else:
        block = int(storage.removeprefix("fp8-"))
        pairs = [quantize_fp8(each, (block, block)) for each in values.numpy()]
    weight, scale = (torch.from_numpy(np.stack(each)) for each in zip(*pairs, strict=True))
    if storage != "fp4":
        weight = weight.view(torch.float8_e4m3fn)
    return Stack(weight, scale.view(torch.float8_e8m0fnu))


def _stacks(random: Random, storage: str, experts: int, dim: int, width: int) -> tuple[Stack, Stack]:
    w13 = _stack(random, storage, experts, 2 * width, dim)
    return w13, _stack(random, storage, experts, dim, width)


@pytest.mark.parametrize("storage", STORAGES)
def test_tiles_of_sorted_rows_each_go_to_their_expert(storage: str) -> None:
    """Sizes that no tile divides, an expert of two tiles, two without rows, a tile of nobody."""
    random = Random(torch.float32)
    w13, w2 = _stacks(random, storage, 3, dim=96, width=96)
    tile_experts = torch.tensor([2, -1, 2], dtype=torch.int32)
    rows, weights = random.normal(len(tile_experts) * ROWS, 96, scale=4.0), random.wide(len(tile_experts) * ROWS)
    case = (rows, tile_experts, weights, w13, w2, LIMIT)
    assert_close(gpu.grouped_mlp_contiguous(*case), gpu.grouped_mlp_contiguous_reference(*case), torch.float32)


def test_rows_beyond_an_experts_count_are_neither_read_nor_written() -> None:
    random = Random(torch.float32)
    w13, w2 = _stacks(random, "fp4", 4, dim=96, width=64)
    counts = torch.tensor([3, 0, 20, 16], dtype=torch.int32)
    rows, weights = random.normal(4, 20, 96), random.wide(4, 20)
    for expert, count in enumerate(counts.tolist()):
        rows[expert, count:] = torch.nan
    case = (rows, counts, weights, w13, w2, LIMIT)
    assert_close(gpu.grouped_mlp_masked(*case), gpu.grouped_mlp_masked_reference(*case), torch.float32)


def test_activations_are_clamped_as_the_model_says() -> None:
    """The gate from above, the other factor on both sides: by hand for one row and one hidden element."""
    w13 = Stack(torch.tensor([[[3.0], [-4.0]]]).repeat(1, 1, 32) / 32)
    w2 = Stack(torch.ones(1, 32, 1))
    rows = torch.zeros(1, ROWS, 32)
    rows[0, 0], rows[0, 1] = 1.0, -1.0
    weights = torch.full((1, ROWS), 0.5)
    out = gpu.grouped_mlp_masked(rows, torch.tensor([2], dtype=torch.int32), weights, w13, w2, limit=2.0)
    silu_of_2, silu_of_minus_3 = 2 / (1 + np.exp(-2)), -3 / (1 + np.exp(3))
    assert out[0, :2, 0].tolist() == pytest.approx([0.5 * silu_of_2 * -2, 0.5 * silu_of_minus_3 * 2], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["fp8-128", "fp4"])
def test_published_depth(storage: str) -> None:
    """DeepSeek-V4-Flash's hidden size and a part of its expert's width, in bfloat16."""
    random = Random(torch.bfloat16)
    w13, w2 = _stacks(random, storage, 1, dim=4096, width=64)
    counts = torch.tensor([ROWS], dtype=torch.int32)
    case = (random.normal(1, ROWS, 4096), counts, random.wide(1, ROWS), w13, w2, LIMIT)
    assert_close(gpu.grouped_mlp_masked(*case), gpu.grouped_mlp_masked_reference(*case), torch.bfloat16, factor=2)


def test_what_does_not_fit_is_refused() -> None:
    random = Random(torch.float32)
    w13, w2 = _stacks(random, "plain", 2, dim=32, width=32)
    counts, rows, weights = torch.ones(2, dtype=torch.int32), torch.zeros(2, 16, 32), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="do not fit rows of 16"):
        gpu.grouped_mlp_masked(rows[:, :, :16].contiguous(), counts, weights, w13, w2, LIMIT)
    with pytest.raises(ValueError, match="not 2 tiles of 16"):
        gpu.grouped_mlp_contiguous(rows[0], counts, weights[0], w13, w2, LIMIT)
    with pytest.raises(ValueError, match="counts of 3"):
        gpu.grouped_mlp_masked(rows, torch.ones(3, dtype=torch.int32), weights, w13, w2, LIMIT)
    fp8 = w13.weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="needs scales"):
        gpu.grouped_mlp_masked(rows, counts, weights, Stack(fp8), w2, LIMIT)
    with pytest.raises(ValueError, match="do not fit weights"):
        gpu.grouped_mlp_masked(rows, counts, weights, Stack(fp8, torch.ones(2, 5, 5).to(torch.float8_e8m0fnu)), w2, 1.0)
