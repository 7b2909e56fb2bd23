"""Linear weights in the form that this machine's kernels read fastest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine.kernels.native import library_for

_TILE = 16  # outputs of one packed tile, as in csrc/packed.h


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
        return self.data.view(*lead, n // _TILE, k // 2, _TILE, 2).transpose(-3, -2).reshape(self.data.shape)


def prepare(weight: torch.Tensor) -> Weight:
    """weight [..., n, k] for `linear`, `grouped_linear`, `expert_mlp` or `dense_mlp`; packed where that is faster."""
    library = library_for(weight)
    *lead, n, k = weight.shape
    if library is None or weight.dtype is not torch.bfloat16 or n % _TILE or k % 2 or not library.headrace_packs():
        return Weight(weight.contiguous())
    tiles = weight.reshape(*lead, n // _TILE, _TILE, k // 2, 2)
    return Weight(tiles.transpose(-3, -2).reshape(weight.shape), packed=True)
