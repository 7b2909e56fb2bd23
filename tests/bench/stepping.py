"""Drives a model's forward by hand: prefill chunks and decode batches over a cache of random entries, and a stopwatch
that tells the parts of a step apart by the kernels they call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headrace_engine import kernels
from headrace_engine.ep.local import LocalExchange
from headrace_engine.kv import layout
from headrace_engine.models.protocol import ForwardBatch, Model

BLOCK = 256  # tokens
PARTS = {
    "attention": ("attention", "write_ring", "head_norm_rope", "rms_norm_rope", "rms_norm"),
    "compressor": ("compress",),
    "indexer": ("select_entries", "select_entries_and_runs", "select_within_runs"),
    "experts": ("route", "expert_mlp", "dense_mlp", "sum_choices"),
    "hyper-connections": (
        "hyper_connection_head",
        "hyper_connection_mix",
        "hyper_connection_update",
        "single_pass_mix",
        "weighted_norm",
    ),
    "projections": ("linear", "grouped_linear"),  # with the head
}
REST = "between kernels"


class Stepper:
    """One rank with a cache for a few sequences; sequence s has blocks of its own. Contents of the cache are random:
    the time of a step does not depend on them."""

    def __init__(self, model: Model, max_context: int, max_batch: int) -> None:
        self._model = model
        self._max_context = max_context
        blocks_of_one = -(-max_context // BLOCK) + 1
        shared = max_batch * 2  # a large batch has short contexts
        self._cache = layout.allocate_cache(model.cache_groups, BLOCK, blocks_of_one + shared, max_batch)
        for tensor in self._cache.values():
            tensor.normal_()
        self._blocks_of_one, self._shared = blocks_of_one, shared

    @torch.inference_mode()
    def prefill(self, num_tokens: int, chunk: int) -> None:
        """One prompt from its first token on."""
        for first in range(0, num_tokens, chunk):
            self._model.forward(self._batch(1, first, min(chunk, num_tokens - first)), self._cache, LocalExchange())

    @torch.inference_mode()
    def decode(self, batch: int, context: int) -> torch.Tensor:
        """One token for each of `batch` sequences that have `context` tokens before it: logits [batch, vocab]."""
        return self._model.forward(self._batch(batch, context, 1), self._cache, LocalExchange())

    @torch.inference_mode()
    def prompt_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [tokens, vocab] of every position of one sequence, which is run as one chunk."""
        batch = replace(
            self._batch(1, 0, len(tokens)),
            token_ids=torch.tensor(tokens),
            logit_rows=torch.arange(len(tokens)),
            previous_ids=torch.full((1, self._model.num_previous_tokens), -1),  # nothing before it
        )
        return self._model.forward(batch, self._cache, LocalExchange())

    def _batch(self, batch: int, first: int, num_tokens: int) -> ForwardBatch:
        """`num_tokens` tokens of each sequence, at positions from `first` on."""
        end = first + num_tokens
        num_blocks = -(-end // BLOCK)
        if batch == 1:
            tables = torch.arange(num_blocks, dtype=torch.int32).view(1, -1)
        else:
            own = torch.arange(batch * num_blocks, dtype=torch.int32).view(batch, -1)
            tables = self._blocks_of_one + own
            if batch * num_blocks > self._shared:
                raise ValueError(f"{batch} sequences of {end} tokens are more than this cache has blocks for")
        return ForwardBatch(
            token_ids=torch.randint(10, 250, (batch * num_tokens,)),
            positions=torch.arange(first, end).repeat(batch),
            query_starts=torch.arange(batch + 1) * num_tokens,
            context_lens=torch.full((batch,), end),
            block_tables=tables,
            state_slots=torch.arange(batch),
            logit_rows=torch.arange(1, batch + 1) * num_tokens - 1,
            query_lens=(num_tokens,) * batch,
            max_context_len=end,
            previous_ids=torch.full((batch, self._model.num_previous_tokens), 20),
        )


class Stopwatch:
    """While it is entered, every kernel that models call counts its seconds for the part it belongs to."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Stopwatch:
        for part, names in PARTS.items():
            for name in names:
                self._originals[name] = getattr(kernels, name)
                setattr(kernels, name, self._counted(part, self._originals[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(kernels, name, original)

    def _counted(self, part: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return kernel(*arguments, **keywords)
            finally:
                self._seconds[part] += time.perf_counter() - began

        return run

    def shares(self, total_seconds: float) -> dict[str, float]:
        """Of the whole time, by part; the rest is between kernels."""
        shares = {part: self._seconds[part] / total_seconds for part in PARTS}
        return {**shares, REST: max(0.0, 1 - sum(shares.values()))}
