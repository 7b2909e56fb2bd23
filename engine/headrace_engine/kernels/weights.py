"""Linear weights in the form that this machine's kernels read fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace_engine.kernels.native import library_for

TILE = 16  # outputs of one packed tile, as in csrc/packed.h


@dataclass(frozen=True)
class Weight:
    """A weight [..., n, k] dt, as it is or packed: [..., n / 16, k / 2, 16, 2], kept under the same shape."""

    data: torch.Tensor
    packed: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def plain(self) -> torch.Tensor:
        """The weight as it was given to `prepare`."""
        if not self.packed:
            return self.data
        *lead, n, k = self.data.shape
        return self.data.view(*lead, n // TILE, k // 2, TILE, 2).transpose(-3, -2).reshape(self.data.shape)


def prepare(weight: torch.Tensor) -> Weight:
    """weight [..., n, k] for `linear`, `grouped_linear`, `expert_mlp` or `dense_mlp`; packed where that is faster."""
    if not _packs(weight):
        return Weight(weight.contiguous())
    tiles = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _pack(weight.contiguous(), tiles)
    return Weight(tiles, packed=True)


class WeightStack:
    """A Weight [count, n, k] in the making, matrix by matrix: nothing of its size is held a second time."""

    def __init__(self, stack: torch.Tensor) -> None:
        """stack [count, n, k]: still empty; becomes the weight's memory."""
        self._stack = stack
        self._plain = torch.empty_like(stack[0]) if _packs(stack) else None

    def write(self, index: int, fill: Callable[[torch.Tensor], None]) -> None:
        """Matrix `index`, where fill(target) writes it into target [n, k]."""
        matrix = self._stack[index]
        if self._plain is None:
            fill(matrix)
        else:
            fill(self._plain)
            _pack(self._plain, matrix)

    def weight(self) -> Weight:
        return Weight(self._stack, self._plain is not None)


def packs(dtype: torch.dtype) -> bool:
    """Whether this machine's kernels read packed weights of a dtype on the CPU."""
    library = library_for(torch.empty(0, dtype=dtype)) if dtype is torch.bfloat16 else None
    return library is not None and bool(library.headrace_packs())


def _packs(weight: torch.Tensor) -> bool:
    n, k = weight.shape[-2:]
    return weight.is_cpu and n % TILE == 0 and k % 2 == 0 and packs(weight.dtype)


def _pack(rows: torch.Tensor, tiles: torch.Tensor) -> None:
    """Contiguous rows [..., n, k] bf16 into tiles of the same shape."""
    library, depth = library_for(rows), rows.shape[-1]
    assert library is not None
    library.headrace_pack(rows.data_ptr(), rows.numel() // (TILE * depth), depth // 2, tiles.data_ptr())
