"""How close a kernel must be to its reference."""

from __future__ import annotations

import torch

# bf16: about 2 units in the last place of the largest values, since the order of sums differs before the one rounding.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Equal shapes and dtypes, finite, and a difference relative to the reference's typical size."""
    assert actual.shape == expected.shape
    assert actual.dtype is expected.dtype
    if actual.numel() == 0:
        return
    assert torch.isfinite(actual).all()
    size = expected.float().square().mean().sqrt().clamp(min=1e-6)
    error = (actual.float() - expected.float()).abs() / (size + expected.float().abs())
    assert error.max() <= factor * TOLERANCE[dtype], f"relative error {error.max():.2e}"
