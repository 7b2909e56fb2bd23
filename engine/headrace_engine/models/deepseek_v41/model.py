"""The DeepSeek-V4.1 text model over a paged cache: one flat batch of prefill chunks and decode tokens per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace_engine import kernels
from headrace_engine.models.access import open_cache
from headrace_engine.models.builder import HyperConnection
from headrace_engine.models.deepseek_v41 import replay
from headrace_engine.models.deepseek_v41.attention import Attention
from headrace_engine.models.deepseek_v41.cache import cache_groups
from headrace_engine.models.deepseek_v41.config import V41Config
from headrace_engine.models.deepseek_v41.engram import Engram, EngramLookup
from headrace_engine.models.deepseek_v41.formats import packed_caches
from headrace_engine.models.deepseek_v41.step import begin_step
from headrace_engine.models.drafter import Tap
from headrace_engine.models.moe import MoE
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.residual import SinglePassResidual
from headrace_engine.models.rope import frequencies

if TYPE_CHECKING:
    from headrace_engine.ep.exchange import Exchange


@dataclass
class Layer:
    attention: Attention
    moe: MoE
    attention_hc: HyperConnection
    moe_hc: HyperConnection
    attention_norm: torch.Tensor  # [hidden] fp32
    moe_norm: torch.Tensor  # [hidden] fp32
    engram: Engram | None


class DeepseekV41:
    """One rank's share: all of attention, this rank's experts. Implements models.protocol.Model."""

    def __init__(
        self,
        config: V41Config,
        *,
        embedding: torch.Tensor,  # [vocab, hidden]
        layers: list[Layer],
        engrams: EngramLookup | None,
        norm: torch.Tensor,  # [hidden] fp32
        head: kernels.Weight,  # [vocab, hidden]
        cache_dtype: str,
        eos_token_ids: tuple[int, ...],
        digest: str,
        bounded_replay: bool = False,  # see `replay`
    ) -> None:
        self.config = config
        self.embedding, self.layers, self.engrams, self.norm, self.head = embedding, layers, engrams, norm, head
        self._records = packed_caches(config).get(cache_dtype)
        self.cache_groups = cache_groups(config, cache_dtype)
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self.eos_token_ids = eos_token_ids
        self.block_multiple = config.block_multiple
        self.num_experts = config.num_experts
        self.num_previous_tokens = 0 if config.engram is None else config.engram.num_previous_tokens
        self.digest = digest
        self.bounded_replay = bounded_replay
        self._last_source = max(config.kv_sources, default=-1)
        self._frequencies = {
            False: frequencies(config.window_rope, config.rope_dim, embedding.device),
            True: frequencies(config.compressed_rope, config.rope_dim, embedding.device),
        }
        self._ratios = sorted({config.ratios[source] for source in config.kv_sources})

    def read_ahead(self, token_ids: Sequence[int]) -> None:
        """See models.protocol.ReadsAhead."""
        if self.engrams is not None:
            self.engrams.read_ahead(token_ids)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        cache: Mapping[str, torch.Tensor],
        exchange: Exchange,
        tap: Tap | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocab] fp32 of the wanted rows; see models.protocol.Model.

        tap: what a drafter reads; with bounded replay, of the rows that are kept (`replay.keep_last`) from there on.
        """
        if batch.replay_lens is not None and not self.bounded_replay:
            raise ValueError("rows are replayed only by a model that was loaded with bounded_replay")
        batch = replay.begin(batch, self.block_multiple)
        found = iter(() if self.engrams is None else self.engrams.begin(batch, self.embedding.dtype))
        step, opened = begin_step(batch, self._frequencies, self._ratios), open_cache(batch, cache, self._records)
        embedded = F.embedding(batch.token_ids, self.embedding)
        streams = embedded.unsqueeze(1).repeat(1, self.config.num_streams, 1)
        residual = SinglePassResidual(self.config, streams)
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                layer.engram.run(streams, next(found))
            if tap is not None:
                tap(index, streams)
            normed, post, comb = residual.read(streams, layer.attention_hc, layer.attention_norm)
            output = layer.attention.run(normed, batch, step, opened)
            kernels.hyper_connection_update(streams, output, post, comb)

            if index == self._last_source and self.bounded_replay:
                kept = replay.keep_last(batch, self.config.window)
                if kept is not None:
                    last = kept.rows
                    batch, step, streams = kept.batch, step.of_rows(last), streams[last]
                    opened = open_cache(batch, cache, self._records)
                    residual.pre, found = residual.pre[last], (rows[last] for rows in found)
            normed, post, comb = residual.read(streams, layer.moe_hc, layer.moe_norm)
            output = layer.moe.run(normed, batch.token_ids, exchange)
            kernels.hyper_connection_update(streams, output, post, comb)
        if tap is not None:
            tap(self.config.num_layers, streams)
        rows = batch.logit_rows
        hidden = kernels.weighted_norm(streams[rows], residual.pre[rows], self.norm, self.config.norm_eps)
        return kernels.linear(hidden, self.head, torch.float32)
