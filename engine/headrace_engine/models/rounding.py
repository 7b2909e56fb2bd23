"""Fake quantization: the roundings that DeepSeek's models were trained with, done by an engine that computes without.

What is rounded, and to which numbers, is each family's to say (its `formats`). The published reference code does all of
it; implementations for training leave it out or do the cache alone.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_engine.kv.records import CacheRecords, RecordFormat, activations

if TYPE_CHECKING:
    import torch


class FakeQuantization(enum.StrEnum):
    """How much of it is done."""

    NONE = "none"
    CACHE = "cache"  # key/values, and the indexer's queries and keys
    ALL = "all"  # what products with quantized weights read, too


@dataclass(frozen=True)
class Rounding:
    """What one model rounds; the default is nothing."""

    cache: CacheRecords | None = None
    kept: CacheRecords | None = None  # of a packed cache: what it keeps in the same format it rounds itself
    turns_index: bool = False  # the indexer's queries and keys go through a Hadamard transform first
    input_block: int = (
        0  # elements of a row that share a scale, before products with FP8 and FP4 weights; 0: not rounded
    )

    def of_window(self, kv: torch.Tensor) -> torch.Tensor:
        """Rotated key/values [T, n] dt of this step's tokens."""
        if self.cache is None or (self.kept is not None and self.kept.window == self.cache.window):
            return kv
        return _rounded(kv, self.cache.window)

    def of_compressed(self, entries: torch.Tensor) -> torch.Tensor:
        """Rotated compressed entries [C, n] dt."""
        if self.cache is None or (self.kept is not None and self.kept.compressed == self.cache.compressed):
            return entries
        return _rounded(entries, self.cache.compressed)

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The indexer's rotated keys [C, n] dt."""
        if self.cache is not None and self.kept is not None and self.kept.index_key == self.cache.index_key:
            return turned(keys) if self.turns_index else keys
        return self.of_queries(keys)

    def of_queries(self, q: torch.Tensor) -> torch.Tensor:
        """The indexer's rotated queries [T, heads, n] dt."""
        if self.cache is None:
            return q
        return _rounded(turned(q) if self.turns_index else q, self.cache.index_key)

    def of_input(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [M, k] dt that a quantized weight is about to be multiplied with."""
        return _rounded(x, activations(x.shape[-1], self.input_block)) if self.input_block else x


NO_ROUNDING = Rounding()


def turned(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Hadamard transform of x [..., n] dt along its last axis, n a power of two; summed in fp32.

    Products of two turned vectors are those of the vectors themselves, but large elements are spread over all.
    """
    return (x.float() @ _hadamard(x.shape[-1]).to(x.device)).to(x.dtype)


@functools.cache
def _hadamard(n: int) -> torch.Tensor:
    """[n, n] fp32, symmetric: +-1/sqrt(n), the sign by how many bits row and column number have in common."""
    import torch

    if n & (n - 1):
        raise ValueError(f"a Hadamard transform needs a power of two, not {n} dims")
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix / math.sqrt(n)


def _rounded(x: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    from headrace_engine import kernels

    return kernels.round_to_records(x, record)
