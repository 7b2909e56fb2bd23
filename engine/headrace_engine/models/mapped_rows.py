"""A table that is far larger than what a step reads of it: single rows of a mapped file."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine.models import page_advice
from headrace_engine.models.dequantize import dequantize_into


@dataclass(frozen=True)
class MappedRows:
    """Plain rows [R, n] of any float type; or e4m3 with ue8m0 scales [R, n / 32], dequantized as they are read."""

    weight: torch.Tensor
    scale: torch.Tensor | None

    def __post_init__(self) -> None:
        for stored in self._stored:
            page_advice.expect_random_reads(stored)

    @property
    def row_dim(self) -> int:
        return self.weight.shape[1]

    @property
    def _stored(self) -> list[torch.Tensor]:
        return [self.weight] if self.scale is None else [self.weight, self.scale]

    def read_ahead(self, rows: torch.Tensor) -> None:
        """Has the system begin to read rows [N] int64 from the file. Any thread."""
        for stored in self._stored:
            page_advice.read_ahead(stored, rows)

    def gather(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [N] int64 of the table: [N, n] dtype."""
        found = self.weight.index_select(0, rows)
        if self.scale is None:
            return found.to(dtype)
        target = torch.empty(found.shape, dtype=dtype)
        dequantize_into(target, found, self.scale.index_select(0, rows))
        return target
