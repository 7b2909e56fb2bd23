"""Experts kept in FP4 give the very bits that the same numbers give as bf16 weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace_engine import kernels as ops
from headrace_engine.kernels.cases import Random
from headrace_engine.kernels.dequantize import dequantize_fp4_reference
from headrace_engine.kernels.fp4_weights import Fp4Stack, Fp4Weight

BF16 = torch.bfloat16
EXPERTS = 3
WIDTH = 96  # W1 and W3 have 12 tiles of outputs: panels of 4
DIM = 544  # W2 has 34: panels, and two tiles that are left; more than the inputs that are widened at a time

Stored = tuple[torch.Tensor, torch.Tensor]


pytestmark = pytest.mark.skipif(not Fp4Stack.fits("cpu", BF16, [16], 32), reason="this machine has no kernel for FP4")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def stored(random: Random, height: int, depth: int, exponents: tuple[int, int] = (115, 122)) -> Stored:
    """A matrix [height, depth] as checkpoints have it, of random codes (all are numbers) and scales."""
    codes = random.integers(0, 256, height, depth // 2).to(torch.uint8)
    scale = random.integers(*exponents, height, depth // 32).to(torch.uint8)
    return codes, scale.view(torch.float8_e8m0fnu)


def stacked(experts: list[list[Stored]]) -> Fp4Weight:
    heights, depth = [len(codes) for codes, _ in experts[0]], 2 * experts[0][0][0].shape[1]
    stack = Fp4Stack(len(experts), heights, depth)
    for expert, parts in enumerate(experts):
        for part, (codes, scale) in enumerate(parts):
            stack.write(expert, part, codes, scale)
    return stack.weight()


def numbers(experts: list[list[Stored]]) -> torch.Tensor:
    """What is stored, by the reference: [E, n, k] bf16."""
    matrices = []
    for parts in experts:
        codes, scale = (torch.cat([part[i].view(torch.uint8) for part in parts]) for i in (0, 1))
        matrix = torch.empty((len(codes), 2 * codes.shape[1]), dtype=BF16)
        dequantize_fp4_reference(codes, scale.view(torch.float8_e8m0fnu).float(), matrix)
        matrices.append(matrix)
    return torch.stack(matrices)


@pytest.mark.parametrize("round_block", [0, 32])
@pytest.mark.parametrize("rows", [0, 1, 5, 11, 30, 330])
def test_products_are_those_of_bf16_weights(rows: int, round_block: int, threads: None) -> None:
    """Of one to four rows of an expert, of a few more, and of more than one thread takes at a time."""
    random = Random(BF16, seed=rows)
    w13 = [[stored(random, WIDTH, DIM), stored(random, WIDTH, DIM)] for _ in range(EXPERTS)]
    w2 = [[stored(random, DIM, WIDTH)] for _ in range(EXPERTS)]
    x, ids, shares = random.normal(rows, DIM), random.integers(-1, EXPERTS, rows), random.wide(rows)
    actual = ops.expert_mlp(x, ids, shares, stacked(w13), stacked(w2), 2.0, round_block)
    plain = ops.prepare(numbers(w13)), ops.prepare(numbers(w2))
    assert torch.equal(actual, ops.expert_mlp(x, ids, shares, *plain, 2.0, round_block))


def test_a_weight_gives_back_the_numbers_whatever_their_scale() -> None:
    """Down to numbers that are not normal in bf16, up to infinity."""
    experts = [[stored(Random(BF16), 16, 64, (0, 255)), stored(Random(BF16), 32, 64, (0, 4))] for _ in range(2)]
    weight = stacked(experts)
    assert weight.shape == (2, 48, 64)
    assert torch.equal(weight.plain().view(torch.int16), numbers(experts).view(torch.int16))


def test_products_with_the_smallest_scales() -> None:
    """2^-127 is no normal number: a kernel that shifts its exponent into place would make it zero."""
    random = Random(BF16)
    w13, w2 = [[stored(random, 32, 32, (0, 1)), stored(random, 32, 32)]], [[stored(random, 32, 32)]]
    x, ids, shares = random.normal(4, 32, scale=2.0**60), torch.zeros(4, dtype=torch.int64), torch.ones(4)
    actual = ops.expert_mlp(x, ids, shares, stacked(w13), stacked(w2), 1e30)
    plain = ops.prepare(numbers(w13)), ops.prepare(numbers(w2))
    assert torch.equal(actual, ops.expert_mlp(x, ids, shares, *plain, 1e30))
    assert bool(actual.any())


def test_scales_that_are_no_numbers_or_do_not_fit_are_refused() -> None:
    stack = Fp4Stack(1, [16], 64)
    codes = torch.zeros((16, 32), dtype=torch.int8)
    with pytest.raises(ValueError, match="not a finite number"):
        stack.write(0, 0, codes, torch.full((16, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    with pytest.raises(ValueError, match=r"scales \[16, 3\] do not fit packed weights \[16, 32\]"):
        stack.write(0, 0, codes, torch.zeros((16, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu))


@pytest.mark.parametrize(
    ("device", "dtype", "heights", "depth"),
    [("meta", BF16, [16], 32), ("cpu", torch.float32, [16], 32), ("cpu", BF16, [24, 8], 32), ("cpu", BF16, [16], 48)],
    ids=["another device", "another dtype", "parts of broken tiles", "broken scales"],
)
def test_what_no_kernel_reads_does_not_fit(device: str, dtype: torch.dtype, heights: list[int], depth: int) -> None:
    assert not Fp4Stack.fits(device, dtype, heights, depth)
