"""The DeepSeek-V4 text model over a paged cache: one flat batch of prefill chunks and decode tokens per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace_engine import kernels
from headrace_engine.models.access import PlainCache, open_cache
from headrace_engine.models.builder import HyperConnection
from headrace_engine.models.deepseek_v4.attention import Attention
from headrace_engine.models.deepseek_v4.cache import cache_groups
from headrace_engine.models.deepseek_v4.config import V4Config
from headrace_engine.models.deepseek_v4.formats import packed_caches
from headrace_engine.models.deepseek_v4.step import Step
from headrace_engine.models.drafter import Tap
from headrace_engine.models.moe import MoE
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.residual import DirectResidual
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

    def run(
        self,
        residual: DirectResidual,
        streams: torch.Tensor,
        batch: ForwardBatch,
        step: Step,
        cache: PlainCache,
        exchange: Exchange,
    ) -> None:
        """In place: streams [T, N, hidden] dt."""
        normed, post, comb = residual.read(streams, self.attention_hc, self.attention_norm)
        output = self.attention.run(normed, batch, step, cache)
        kernels.hyper_connection_update(streams, output, post, comb)

        normed, post, comb = residual.read(streams, self.moe_hc, self.moe_norm)
        output = self.moe.run(normed, batch.token_ids, exchange)
        kernels.hyper_connection_update(streams, output, post, comb)


class DeepseekV4:
    """One rank's share: all of attention, this rank's experts. Implements models.protocol.Model."""

    def __init__(
        self,
        config: V4Config,
        *,
        embedding: torch.Tensor,  # [vocab, hidden]
        layers: list[Layer],
        head_hc: HyperConnection,
        norm: torch.Tensor,  # [hidden] fp32
        head: kernels.Weight,  # [vocab, hidden]
        cache_dtype: str,
        eos_token_ids: tuple[int, ...],
        digest: str,
    ) -> None:
        self.config = config
        self.embedding, self.layers, self.head_hc, self.norm, self.head = embedding, layers, head_hc, norm, head
        self._residual = DirectResidual(config, head_hc)
        self._records = packed_caches(config).get(cache_dtype)
        self.cache_groups = cache_groups(config, cache_dtype)
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self.eos_token_ids = eos_token_ids
        self.block_multiple = config.block_multiple
        self.num_experts = config.num_experts
        self.num_previous_tokens = 0
        self.digest = digest
        self._frequencies = {
            False: frequencies(config.window_rope, config.rope_dim, embedding.device),
            True: frequencies(config.compressed_rope, config.rope_dim, embedding.device),
        }

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        cache: Mapping[str, torch.Tensor],
        exchange: Exchange,
        tap: Tap | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocab] fp32 of the wanted rows; see models.protocol.Model. tap: what a drafter reads."""
        step, opened = Step(batch, self._frequencies), open_cache(batch, cache, self._records)
        embedded = F.embedding(batch.token_ids, self.embedding)
        streams = embedded.unsqueeze(1).repeat(1, self.config.num_streams, 1)
        for index, layer in enumerate(self.layers):
            if tap is not None:
                tap(index, streams)
            layer.run(self._residual, streams, batch, step, opened, exchange)
        if tap is not None:
            tap(self.config.num_layers, streams)
        return self._logits(streams[batch.logit_rows])

    def _logits(self, streams: torch.Tensor) -> torch.Tensor:
        config, hc = self.config, self.head_hc
        hidden = kernels.hyper_connection_head(
            streams, hc.fn, hc.base, hc.scale, self.norm, rms_eps=config.norm_eps, hc_eps=config.hc_eps
        )
        return kernels.linear(hidden, self.head, torch.float32)
