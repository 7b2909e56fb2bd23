"""Engram: hashed n-gram memory that some layers add to the residual streams (DeepSeek-V4.1 report, on engram).

Tables are far larger than everything else and a step needs a few rows of them, so they stay in the checkpoint's mapped
file. Which rows follows from token ids alone, so the system is asked for their pages before the layer that reads them
runs: for a prompt when it arrives, for sampled tokens when their step begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from headrace_engine import kernels
from headrace_engine.models.background import Background
from headrace_engine.models.deepseek_v41.ngram_hash import NgramHash, ngrams_of_step
from headrace_engine.models.mapped_rows import MappedRows
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.rounding import Rounding

_MAX_WAITING = 256  # prompts and steps whose pages are not yet asked for
_PROMPT_PART = 1024  # tokens
_MAX_SAMPLED = 64  # tokens of a step that asks for pages; those of larger ones are of prompts, asked for long ago
_MIN_DOT = 1e-6  # below the gate's root, whose slope is infinite at zero


@dataclass
class EngramLookup:
    """The hash functions of all engram layers, and their tables."""

    hashes: NgramHash
    tables: list[MappedRows]  # [rows, row_dim] each
    reader: Background = field(default_factory=lambda: Background("engram", _MAX_WAITING))

    def read_ahead(self, token_ids: Sequence[int]) -> None:
        """A prompt that will be computed: its rows are asked for, part after part, off the caller's thread."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        self.reader.submit(lambda: self._read_prompt(ids))

    def begin(self, batch: ForwardBatch, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """What each engram layer's table holds of the step's tokens, read when it is its turn: [T, n] dtype.

        n is num_hashes * row_dim.
        """
        if batch.previous_ids is None:
            raise ValueError("this model needs ForwardBatch.previous_ids")
        ngrams = ngrams_of_step(batch.token_ids, batch.query_lens, batch.previous_ids)
        rows = self.hashes.rows(ngrams)
        if len(ngrams) <= _MAX_SAMPLED:
            self.reader.submit(lambda: self._read_rows(rows))
        return (
            table.gather(own.flatten(), dtype).view(len(own), own.shape[1] * table.row_dim)
            for own, table in zip(rows, self.tables, strict=True)
        )

    def _read_prompt(self, token_ids: torch.Tensor) -> None:
        previous = torch.full((1, self.hashes.num_previous), -1)
        for part in torch.split(token_ids, _PROMPT_PART):
            self._read_rows(self.hashes.rows(ngrams_of_step(part, (len(part),), previous)))
            previous = torch.cat([previous, part.unsqueeze(0)], dim=1)[:, -self.hashes.num_previous :]

    def _read_rows(self, rows: torch.Tensor) -> None:
        """rows [L, N, num_hashes], as of NgramHash."""
        for own, table in zip(rows, self.tables, strict=True):
            table.read_ahead(own.flatten())


@dataclass
class Engram:
    """One layer's weights."""

    w_kv: kernels.Weight  # [(N + 1) * hidden, num_hashes * row_dim]: a key for each stream, and the value
    gain: torch.Tensor  # [N, hidden] fp32: norm weights of query and key, which only ever appear as their product
    eps: float
    rounding: Rounding

    def run(self, streams: torch.Tensor, found: torch.Tensor) -> None:
        """In place: streams [T, N, hidden] dt each take the value by a gate of their own; found as from the lookup."""
        tokens, num_streams, dim = streams.shape
        projected = kernels.linear(self.rounding.of_input(found), self.w_kv).view(tokens, num_streams + 1, dim).float()
        keys, value = projected[:, :num_streams], projected[:, num_streams:]
        wide = streams.float()
        dot = (wide * keys * self.gain).sum(dim=-1, keepdim=True) * self._inverse_rms(wide) * self._inverse_rms(keys)
        dot = dot * dim**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=_MIN_DOT).sqrt(), dot))
        streams.copy_(torch.addcmul(wide, gate, value))

    def _inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
