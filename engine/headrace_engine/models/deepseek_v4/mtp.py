"""DeepSeek-V4's multi-token prediction: one more layer, of the main model's last streams and the token that follows.

Report, section 2.1. Fed back its own streams, it drafts further tokens, each less likely to be accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace_engine import kernels
from headrace_engine.models.access import PlainCache
from headrace_engine.models.builder import HyperConnection
from headrace_engine.models.deepseek_v4.cache import WINDOW
from headrace_engine.models.deepseek_v4.config import V4Config
from headrace_engine.models.deepseek_v4.draft import MTP_WINDOW
from headrace_engine.models.deepseek_v4.model import Layer
from headrace_engine.models.deepseek_v4.step import Step
from headrace_engine.models.drafter import Drafts, StreamTap
from headrace_engine.models.protocol import CacheGroup, ForwardBatch
from headrace_engine.models.residual import DirectResidual
from headrace_engine.models.rope import frequencies

if TYPE_CHECKING:
    from headrace_engine.ep.exchange import Exchange


@dataclass
class MtpWeights:
    """In the model dtype, norms in fp32; embedding and head are the main model's."""

    embedding: torch.Tensor  # [vocab, hidden]
    embedding_norm: torch.Tensor  # [hidden]
    w_embedding: kernels.Weight  # [hidden, hidden]
    streams_norm: torch.Tensor  # [hidden]
    w_streams: kernels.Weight  # [hidden, hidden]
    layer: Layer
    head_hc: HyperConnection
    norm: torch.Tensor  # [hidden]
    head: kernels.Weight  # [vocab, hidden]


class Mtp:
    """One rank's share: all of attention, this rank's experts. Implements models.drafter.Drafter."""

    def __init__(
        self,
        config: V4Config,  # of the one layer
        weights: MtpWeights,
        *,
        num_main_layers: int,
        num_drafts: int,
        cache_groups: tuple[CacheGroup, ...],
    ) -> None:
        self.config, self.weights = config, weights
        self.num_drafts, self.num_experts, self.cache_groups = num_drafts, config.num_experts, cache_groups
        self._num_main_layers = num_main_layers
        self._residual = DirectResidual(config, weights.head_hc)
        self._frequencies = {False: frequencies(config.window_rope, config.rope_dim, weights.embedding.device)}

    def tap(self) -> StreamTap:
        """See models.drafter.Drafter."""
        return StreamTap([self._num_main_layers], is_mean=False)

    @torch.inference_mode()
    def draft(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        next_ids: torch.Tensor,
        wanted: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        exchange: Exchange,
    ) -> Drafts:
        """See models.drafter.Drafter."""
        streams = features.view(len(next_ids), self.config.num_streams, self.config.hidden_size)
        streams = self._run(streams, next_ids, batch, cache, exchange)
        streams = streams[batch.query_starts[wanted + 1] - 1]
        logits = [self._logits(streams)]
        for number in range(1, self.num_drafts):
            drafted = logits[-1].argmax(dim=1)
            ahead = _rows_ahead(batch, wanted, drafted, number)
            streams = self._run(streams, drafted, ahead, cache, exchange)
            logits.append(self._logits(streams))
        stacked = torch.stack(logits, dim=1)
        return Drafts(stacked.argmax(dim=2), stacked, None)

    def _run(
        self,
        streams: torch.Tensor,
        next_ids: torch.Tensor,
        batch: ForwardBatch,
        cache: Mapping[str, torch.Tensor],
        exchange: Exchange,
    ) -> torch.Tensor:
        """The layer's output streams [T, N, hidden] dt of its input ones and the token after each row."""
        weights, eps = self.weights, self.config.norm_eps
        tokens, num_streams, hidden = streams.shape
        normed = kernels.rms_norm(streams.reshape(-1, hidden), weights.streams_norm, eps)
        mixed = kernels.linear(normed, weights.w_streams).view(tokens, num_streams, hidden)
        embedded = kernels.rms_norm(F.embedding(next_ids, weights.embedding), weights.embedding_norm, eps)
        mixed += kernels.linear(embedded, weights.w_embedding).unsqueeze(1)
        step, window = Step(batch, self._frequencies), PlainCache(batch, {WINDOW: cache[MTP_WINDOW]})
        weights.layer.run(self._residual, mixed, batch, step, window, exchange)
        return mixed

    def _logits(self, streams: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        hidden = kernels.rms_norm(self._residual.collapse(streams), weights.norm, self.config.norm_eps)
        return kernels.linear(hidden, weights.head, torch.float32)


def _rows_ahead(batch: ForwardBatch, wanted: torch.Tensor, token_ids: torch.Tensor, number: int) -> ForwardBatch:
    """One row for each of the sequences `wanted`, `number` positions after its last one in the batch."""
    lengths = batch.context_lens[wanted] + number
    count = len(wanted)
    return dataclasses.replace(
        batch,
        token_ids=token_ids,
        positions=lengths - 1,
        query_starts=torch.arange(count + 1, device=lengths.device),
        context_lens=lengths,
        block_tables=batch.block_tables[wanted],
        state_slots=batch.state_slots[wanted],
        logit_rows=torch.arange(count, device=lengths.device),
        query_lens=(1,) * count,
        max_context_len=batch.max_context_len + number,
        previous_ids=None,
    )
