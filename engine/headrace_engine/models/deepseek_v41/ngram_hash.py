"""Engram's hash functions: from the last few tokens to rows of each layer's table (DeepSeek-V4.1 report, on engram).

Everything follows from the configuration: odd multipliers per layer, and a prime number of buckets per layer, n-gram
size and head, each used once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_engine.models.deepseek_v41.config import EngramConfig
from headrace_engine.models.errors import ModelError

_SEED_STEP = 10007
_MAX_INT64 = 2**63 - 1


def multipliers(layer: int, count: int, compressed_vocab_size: int) -> NDArray[np.int64]:
    """[count] odd factors, so small that no product with a compressed id overflows int64."""
    bound = max(1, _MAX_INT64 // compressed_vocab_size // 2)
    return np.random.default_rng(_SEED_STEP * layer).integers(0, bound, count, dtype=np.int64) * 2 + 1


def bucket_counts(config: EngramConfig) -> NDArray[np.int64]:
    """[layers, n-gram sizes, heads] primes: of each size the smallest from bucket_base on that are not yet used."""
    used: set[int] = set()
    shape = (len(config.layers), config.max_ngram - 1, config.num_heads)
    counts = np.empty(shape, dtype=np.int64)
    for layer in range(shape[0]):
        for size in range(shape[1]):
            candidate = config.bucket_base - 1
            for head in range(shape[2]):
                candidate = _next_prime(candidate, used)
                used.add(candidate)
                counts[layer, size, head] = candidate
    return counts


def _next_prime(after: int, used: set[int]) -> int:
    candidate = max(after + 1, 2)
    while candidate in used or any(candidate % divisor == 0 for divisor in range(2, math.isqrt(candidate) + 1)):
        candidate += 1
    return candidate


class NgramHash:
    """All layers' hash functions over a token map. Raises ModelError if a table has too few rows for its buckets."""

    def __init__(self, config: EngramConfig, token_map: NDArray[np.int64]) -> None:
        self.num_previous = config.num_previous_tokens
        self._token_map = torch.from_numpy(token_map)
        self._pad = int(token_map[config.pad_token_id])
        factors = [multipliers(layer, config.max_ngram, config.compressed_vocab_size) for layer in config.layers]
        self._multipliers = torch.from_numpy(np.stack(factors))  # [L, max_ngram]
        counts = bucket_counts(config).reshape(len(config.layers), config.num_hashes)
        for layer, num_rows, needed in zip(config.layers, config.num_rows, counts.sum(axis=1).tolist(), strict=True):
            if needed > num_rows:
                raise ModelError(
                    f"config.json: engram layer {layer} hashes into {needed} rows, its table has {num_rows}"
                    " (engram_num_embeddings)"
                )
        self._counts = torch.from_numpy(counts).view(len(config.layers), config.max_ngram - 1, config.num_heads)
        ends = torch.from_numpy(counts.cumsum(axis=1))
        self._offsets = (ends - torch.from_numpy(counts)).view(self._counts.shape)

    def rows(self, ngrams: torch.Tensor) -> torch.Tensor:
        """Table rows [L, N, num_hashes] int64, by n-gram size and then head, of each token and those before it.

        ngrams [N, max_ngram] int64: token ids, the newest first, -1 for what is before the sequence.
        """
        ids = torch.where(ngrams >= 0, self._token_map[ngrams.clamp(min=0)], self._pad)
        products = ids.unsqueeze(0) * self._multipliers.unsqueeze(1)  # [L, N, max_ngram]
        mixed, hashes = products[..., 0], []
        for size in range(self._counts.shape[1]):
            mixed = mixed ^ products[..., size + 1]
            rows = mixed.unsqueeze(-1) % self._counts[:, size].unsqueeze(1) + self._offsets[:, size].unsqueeze(1)
            hashes.append(rows)
        return torch.cat(hashes, dim=-1)


def ngrams_of_step(token_ids: torch.Tensor, query_lens: tuple[int, ...], previous: torch.Tensor) -> torch.Tensor:
    """[T, H + 1]: each token of a step and the H before it in its sequence, newest first, -1 before the sequence.

    token_ids [T] of S sequences after one another; previous [S, H]: the ids before each sequence's first token here,
    oldest first, -1 where there are none.
    """
    num_previous = previous.shape[1]
    lengths = torch.tensor(query_lens, dtype=torch.int64, device=token_ids.device)
    # One row of history before each sequence's tokens: then every n-gram is a window of one line.
    starts = lengths.cumsum(0) - lengths
    line = torch.empty(len(token_ids) + previous.numel(), dtype=token_ids.dtype, device=token_ids.device)
    sequence = torch.repeat_interleave(torch.arange(len(query_lens), device=token_ids.device), lengths)
    places = torch.arange(len(token_ids), device=token_ids.device) + (sequence + 1) * num_previous
    line[places] = token_ids
    history = starts + torch.arange(len(query_lens), device=token_ids.device) * num_previous
    line[history.unsqueeze(1) + torch.arange(num_previous, device=token_ids.device)] = previous
    return line[places.unsqueeze(1) - torch.arange(num_previous + 1, device=token_ids.device)]
