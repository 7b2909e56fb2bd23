"""The number formats of DeepSeek's training, by their definitions: every number goes to the nearest one of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(x: torch.Tensor, table: list[float]) -> torch.Tensor:
    """Each number of x to the nearest of +-table (ascending from 0), of two equally near ones to the even place."""
    values = torch.tensor(table, dtype=torch.float64)
    distances = (x.double().abs().unsqueeze(-1) - values).abs()
    distances[..., 1::2] = distances[..., 1::2].nextafter(
        torch.tensor(math.inf, dtype=torch.float64)
    )  # even ones first
    return torch.copysign(values[distances.argmin(-1)], x.double())


def in_blocks(
    x: torch.Tensor, size: int, largest: float, smallest: float, table: list[float], scales: list[float] | None = None
) -> torch.Tensor:
    """x [..., n] rounded in blocks of `size` along the last axis, the last of which may be shorter.

    The largest magnitude of a block, `smallest` at least, becomes `largest` of the table by a factor that is the
    nearest of `scales`; None: the next power of two that is large enough.
    """
    n = x.shape[-1]
    blocks = F.pad(x.double(), (0, -n % size)).unflatten(-1, (-1, size))
    wanted = blocks.abs().amax(-1, keepdim=True).clamp(min=smallest) / largest
    factor = 2.0 ** torch.ceil(torch.log2(wanted)) if scales is None else nearest(wanted.clamp(max=scales[-1]), scales)
    rounded = nearest((blocks / factor).clamp(-largest, largest), table) * factor
    return rounded.flatten(-2)[..., :n].to(x.dtype)


def fp8(x: torch.Tensor, size: int) -> torch.Tensor:
    return in_blocks(x, size, 448, 1e-4, E4M3)


def mxfp4(x: torch.Tensor) -> torch.Tensor:
    return in_blocks(x, 32, 6, 6 * 2.0**-126, E2M1)


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    return in_blocks(x, 16, 6, 6 * 2.0**-9, E2M1, scales=E4M3)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal, along the last axis: halves are added and subtracted, each half again so, and so on."""
    n = x.shape[-1]
    if n == 1:
        return x
    low, high = x.split(n // 2, dim=-1)
    return torch.cat([hadamard(low + high), hadamard(low - high)], dim=-1) / math.sqrt(2)


@dataclass(frozen=True)
class V41Rounding:
    """What DeepSeek-V4.1 rounds in training."""

    cache: bool = False
    inputs: bool = False  # of products with quantized weights

    def window(self, kv: torch.Tensor) -> torch.Tensor:
        return fp8(kv, 32) if self.cache else kv

    def entries(self, entries: torch.Tensor) -> torch.Tensor:
        return nvfp4(entries) if self.cache else entries

    def index(self, x: torch.Tensor) -> torch.Tensor:
        return mxfp4(x) if self.cache else x

    def input(self, x: torch.Tensor) -> torch.Tensor:
        return fp8(x, 32) if self.inputs else x


EXACT = V41Rounding()
