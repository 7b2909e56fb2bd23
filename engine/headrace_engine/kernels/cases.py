"""Random inputs for the kernels, shared by tests and bench. Data is seeded, shapes are the caller's."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from headrace_engine.models.protocol import ForwardBatch


@dataclass
class Random:
    """A seeded source of tensors of one dtype."""

    dtype: torch.dtype
    seed: int = 0

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return self.wide(*shape, scale=scale).to(self.dtype)

    def wide(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """fp32 whatever the dtype."""
        return torch.randn(shape, generator=self._generator) * scale

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self._generator)


def make_batch(random: Random, parts: SequenceOf[tuple[int, int]], block_size: int) -> ForwardBatch:
    """A step of sequences (first position, number of tokens), with scattered blocks and slots."""
    contexts = [first + length for first, length in parts]
    max_blocks = max([-(-context // block_size) for context in contexts], default=0) + 1
    blocks = random.permutation(len(parts) * max_blocks).view(len(parts), max_blocks)
    positions = [torch.arange(first, first + length) for first, length in parts]
    return ForwardBatch(
        token_ids=torch.zeros(sum(length for _, length in parts), dtype=torch.int64),
        positions=torch.cat([torch.empty(0, dtype=torch.int64), *positions]),
        query_starts=torch.tensor([0, *(length for _, length in parts)]).cumsum(0),
        context_lens=torch.tensor(contexts, dtype=torch.int64),
        block_tables=blocks.to(torch.int32),
        state_slots=random.permutation(len(parts)),
        logit_rows=torch.empty(0, dtype=torch.int64),
        query_lens=tuple(length for _, length in parts),
        max_context_len=max(contexts, default=0),
    )


def num_blocks(batch: ForwardBatch) -> int:
    return batch.block_tables.numel()


def angles(positions: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [T, half] fp32 of the plain rotary embedding."""
    angle = positions.float().unsqueeze(1) * frequencies(half)
    return angle.cos(), angle.sin()


def frequencies(half: int) -> torch.Tensor:
    return 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
