"""DSpark: after each step one parallel pass drafts a block of tokens (DeepSeek-V4.1 report, on DSpark).

Its context is the main model's streams, projected once; each stage keeps a window of keys made of it. The block's rows
are the last token and noise: they see the window and each other, and their own keys are dropped after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace_engine import kernels
from headrace_engine.models.builder import HyperConnection
from headrace_engine.models.drafter import Drafts, StreamTap
from headrace_engine.models.dspark.attention import BlockAttention, Blocks
from headrace_engine.models.dspark.config import WINDOW, DsparkConfig, StageConfig, cache_groups
from headrace_engine.models.dspark.heads import DraftHeads
from headrace_engine.models.moe import MoE
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.residual import Residual
from headrace_engine.models.rope import frequencies, step_rope

if TYPE_CHECKING:
    from headrace_engine.ep.exchange import Exchange


@dataclass
class Stage:
    attention: BlockAttention
    moe: MoE
    attention_hc: HyperConnection
    moe_hc: HyperConnection
    attention_norm: torch.Tensor  # [hidden] fp32
    moe_norm: torch.Tensor  # [hidden] fp32


class Dspark:
    """One rank's share: all of attention, this rank's experts. Implements models.drafter.Drafter."""

    def __init__(
        self,
        dspark: DsparkConfig,
        config: StageConfig,
        *,
        embedding: torch.Tensor,  # [vocab, hidden], the main model's
        w_context: kernels.Weight,  # [hidden, entries * hidden]
        context_norm: torch.Tensor,  # [hidden] fp32
        stages: list[Stage],
        residual_of: Callable[[torch.Tensor], Residual],  # a pass's, by its streams
        heads: DraftHeads,
        cache_dtype: str,
    ) -> None:
        self.dspark, self.config = dspark, config
        self.stages, self.heads = stages, heads
        self.cache_groups = cache_groups(dspark, config, cache_dtype)
        self.num_drafts, self.num_experts = dspark.block_size, config.num_experts
        self._embedding, self._w_context, self._context_norm = embedding, w_context, context_norm
        self._residual_of = residual_of
        self._frequencies = frequencies(config.window_rope, config.rope_dim, embedding.device)

    def tap(self) -> StreamTap:
        """See models.drafter.Drafter."""
        return StreamTap(self.dspark.entries, is_mean=True)

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
        """See models.drafter.Drafter. Only the last one of a sequence's next_ids matters."""
        ring = cache[WINDOW]
        self._keep_context(features, batch, ring)
        anchors = next_ids[batch.query_starts[wanted + 1] - 1]
        blocks = Blocks(batch.context_lens[wanted], batch.state_slots[wanted])
        states = self._run_blocks(anchors, blocks, ring, exchange)
        return self.heads.run(states, anchors, self.num_drafts, self.config.norm_eps)

    def _keep_context(self, features: torch.Tensor, batch: ForwardBatch, ring: torch.Tensor) -> None:
        eps, rope = self.config.norm_eps, step_rope(batch.positions, self._frequencies)
        context = kernels.rms_norm(kernels.linear(features, self._w_context), self._context_norm, eps)
        for index, stage in enumerate(self.stages):
            stage.attention.keep(context, batch, rope, ring, index, eps)

    def _run_blocks(
        self, anchors: torch.Tensor, blocks: Blocks, ring: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor:
        """[D * K, hidden] dt: the stages' last streams, collapsed."""
        size = self.dspark.block_size
        token_ids = anchors.new_full((len(anchors), size), self.dspark.noise_token_id)
        token_ids[:, 0] = anchors
        token_ids = token_ids.flatten()
        positions = (blocks.starts.unsqueeze(1) + torch.arange(size, device=anchors.device)).flatten()
        rope = step_rope(positions, self._frequencies)
        streams = F.embedding(token_ids, self._embedding).unsqueeze(1).repeat(1, self.config.num_streams, 1)
        residual = self._residual_of(streams)
        for index, stage in enumerate(self.stages):
            normed, post, comb = residual.read(streams, stage.attention_hc, stage.attention_norm)
            output = stage.attention.run(normed, blocks, rope, ring, index, self.config)
            kernels.hyper_connection_update(streams, output, post, comb)

            normed, post, comb = residual.read(streams, stage.moe_hc, stage.moe_norm)
            output = stage.moe.run(normed, token_ids, exchange)
            kernels.hyper_connection_update(streams, output, post, comb)
        return residual.collapse(streams)
