"""Triton kernels run by its interpreter, which is slow: one case of each kind runs always, the others with `slow`."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value
