"""Engram: hashed n-gram memory that some layers add to the residual streams (DeepSeek-V4.1 report, on engram).

Tables are far larger than everything else and a step needs a few rows of them, so they stay in the checkpoint's mapped
file. Which rows follows from token ids alone: they are gathered before the step's first layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.models.deepseek_v41.ngram_hash import NgramHash, ngrams_of_step
from headrace_engine.models.mapped_rows import MappedRows
from headrace_engine.models.protocol import ForwardBatch

_MIN_DOT = 1e-6  # below the gate's root, whose slope is infinite at zero


@dataclass
class EngramLookup:
    """The hash functions of all engram layers, and their tables."""

    hashes: NgramHash
    tables: list[MappedRows]  # [rows, row_dim] each

    def gather(self, batch: ForwardBatch, dtype: torch.dtype) -> list[torch.Tensor]:
        """What each engram layer's table holds of the step's tokens: [T, num_hashes * row_dim] dtype."""
        if batch.previous_ids is None:
            raise ValueError("this model needs ForwardBatch.previous_ids")
        ngrams = ngrams_of_step(batch.token_ids, batch.query_lens, batch.previous_ids)
        rows = self.hashes.rows(ngrams)
        return [
            table.gather(own.flatten(), dtype).view(len(own), own.shape[1] * table.row_dim)
            for own, table in zip(rows, self.tables, strict=True)
        ]


@dataclass
class Engram:
    """One layer's weights."""

    w_kv: kernels.Weight  # [(N + 1) * hidden, num_hashes * row_dim]: a key for each stream, and the value
    gain: torch.Tensor  # [N, hidden] fp32: norm weights of query and key, which only ever appear as their product
    eps: float

    def run(self, streams: torch.Tensor, found: torch.Tensor) -> None:
        """In place: streams [T, N, hidden] dt each take the value by a gate of their own; found as from the lookup."""
        tokens, num_streams, dim = streams.shape
        projected = kernels.linear(found, self.w_kv).view(tokens, num_streams + 1, dim).float()
        keys, value = projected[:, :num_streams], projected[:, num_streams:]
        wide = streams.float()
        dot = (wide * keys * self.gain).sum(dim=-1, keepdim=True) * self._inverse_rms(wide) * self._inverse_rms(keys)
        dot = dot * dim**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=_MIN_DOT).sqrt(), dot))
        streams.copy_(torch.addcmul(wide, gate, value))

    def _inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
