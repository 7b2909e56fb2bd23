"""A stage's attention: a block's rows over the context's last rows and the whole block, one shared key/value head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.models.dspark.config import StageConfig
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.rope import StepRope


@dataclass(frozen=True)
class Blocks:
    """D drafted blocks of K rows."""

    starts: torch.Tensor  # [D], position of a block's first row
    slots: torch.Tensor  # [D], state slot of its sequence


@dataclass
class BlockAttention:
    """One stage's tensors in the model dtype, norms and sinks in fp32. Context rows use w_kv and kv_norm only."""

    w_q_a: kernels.Weight  # [q_lora_rank, hidden]
    w_kv: kernels.Weight  # [head_dim, hidden]
    w_q: kernels.Weight  # [heads * head_dim, q_lora_rank]
    w_out_a: kernels.Weight  # [groups, output_lora_rank, heads * head_dim / groups]
    w_out_b: kernels.Weight  # [hidden, groups * output_lora_rank]
    q_norm: torch.Tensor  # [q_lora_rank]
    kv_norm: torch.Tensor  # [head_dim]
    sinks: torch.Tensor  # [heads]
    head_norm_eps: float | None  # DeepSeek-V4 norms each head of q

    def keep(
        self, context: torch.Tensor, batch: ForwardBatch, rope: StepRope, ring: torch.Tensor, stage: int, eps: float
    ) -> None:
        """Writes the rows of context [T, hidden] dt, at the batch's positions, to the stage's ring."""
        kernels.write_ring(self._kv(context, rope, eps), ring, stage, batch)

    def run(
        self,
        x: torch.Tensor,
        blocks: Blocks,
        rope: StepRope,
        ring: torch.Tensor,
        stage: int,
        config: StageConfig,
    ) -> torch.Tensor:
        """x [D * K, hidden] dt, normed -> the sublayer's output [D * K, hidden] dt. rope: at the rows' positions."""
        latent = kernels.rms_norm(kernels.linear(x, self.w_q_a), self.q_norm, config.norm_eps)
        q = kernels.linear(latent, self.w_q).view(-1, config.num_heads, config.head_dim)
        kernels.head_norm_rope(q, rope.cos, rope.sin, self.head_norm_eps)
        kv = self._kv(x, rope, config.norm_eps)
        kv = kv.to(ring.dtype).to(kv.dtype)  # of one precision with the context
        scale = config.head_dim**-0.5
        attended = kernels.block_attention(
            q, kv, blocks.starts, blocks.slots, ring, stage, config.window, self.sinks, scale, rope.cos, rope.sin
        )
        num_groups, rank, depth = self.w_out_a.shape
        grouped = kernels.grouped_linear(attended.view(-1, num_groups, depth), self.w_out_a)
        return kernels.linear(grouped.view(-1, num_groups * rank), self.w_out_b)

    def _kv(self, x: torch.Tensor, rope: StepRope, eps: float) -> torch.Tensor:
        return kernels.rms_norm_rope(kernels.linear(x, self.w_kv), self.kv_norm, rope.cos, rope.sin, eps)
