"""Hyper-connections of four streams, against the references of the CPU kernels."""

from __future__ import annotations

import pytest
import torch
from tests.engine.kernels.compare import assert_close

from headrace_engine.kernels import hyper_connection as reference
from headrace_engine.kernels.cases import Random
from headrace_engine.kernels.gpu import hyper_connection as gpu

STREAMS = 4
SETTINGS = {"rms_eps": 1e-6, "hc_eps": 1e-6, "iterations": 20}


def _case(random: Random, tokens: int, dim: int) -> tuple[torch.Tensor, ...]:
    outputs = (2 + STREAMS) * STREAMS
    fn = random.wide(outputs, STREAMS * dim, scale=dim**-0.5)
    return random.normal(tokens, STREAMS, dim), fn, random.wide(outputs), random.wide(3), random.wide(dim)


def _assert_all_close(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_close(a, b, dtype if index == 0 else torch.float32, factor=2)


@pytest.mark.parametrize("dim", [32, pytest.param(544, marks=pytest.mark.slow)])
def test_mix_by_the_site_before(dim: int) -> None:
    random = Random(torch.float32)
    case, pre = _case(random, 2, dim), random.wide(2, STREAMS)
    found = gpu.single_pass_mix(*case, pre, **SETTINGS)
    _assert_all_close(found, reference.single_pass_mix_reference(*case, pre, **SETTINGS), torch.float32)


@pytest.mark.slow
def test_mix_by_the_own_site() -> None:
    case = _case(Random(torch.float32), 1, 32)
    found = gpu.single_pass_mix(*case, None, **SETTINGS)
    _assert_all_close(found[:3], reference.hyper_connection_mix_reference(*case, **SETTINGS), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [4096, 5120])
def test_mix_at_the_published_sizes(dim: int) -> None:
    random = Random(torch.bfloat16)
    case, pre = _case(random, 1, dim), random.wide(1, STREAMS)
    found = gpu.single_pass_mix(*case, pre, **SETTINGS)
    _assert_all_close(found, reference.single_pass_mix_reference(*case, pre, **SETTINGS), torch.bfloat16)


def test_update_in_place(dtype: torch.dtype) -> None:
    random = Random(dtype)
    streams, y = random.normal(2, STREAMS, 544), random.normal(2, 544)
    post, comb = random.wide(2, STREAMS), random.wide(2, STREAMS, STREAMS)
    expected = reference.hyper_connection_update_reference(streams, y, post, comb)
    assert gpu.hyper_connection_update(streams, y, post, comb) is streams
    assert_close(streams, expected, dtype)


def test_what_does_not_fit_is_refused() -> None:
    streams, fn, base, scale, norm = _case(Random(torch.float32), 1, 32)
    with pytest.raises(ValueError, match="fn must be contiguous fp32 of 3072 elements"):
        gpu.single_pass_mix(streams, fn[:8], base, scale, norm, None, **SETTINGS)
    with pytest.raises(ValueError, match="a power of two"):
        gpu.single_pass_mix(streams[:, :3].contiguous(), fn, base, scale, norm, None, **SETTINGS)
    with pytest.raises(ValueError, match=r"y \[1, 32\]"):
        gpu.hyper_connection_update(streams, torch.zeros(1, 16), base[:4], base[:16])
