"""DeepSeek-V4's attention: one shared key/value head over a window of raw tokens and compressed entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.models.closing import make_room, write_entries
from headrace_engine.models.deepseek_v4.cache import CARRY_OF_KIND, INDEX, INDEX_CARRY, KV_OF_KIND, WINDOW
from headrace_engine.models.deepseek_v4.config import V4Config
from headrace_engine.models.deepseek_v4.step import Step
from headrace_engine.models.projections import InputProjections
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.rope import StepRope
from headrace_engine.models.rounding import Rounding


@dataclass
class AttentionWeights:
    """One layer's tensors in the model dtype, norms and sinks in fp32; projections with one input are fused."""

    w_in: InputProjections  # q latent, kv, compressor's and indexer's values | gates each, index head weights
    w_q: kernels.Weight  # [heads * head_dim, q_lora_rank]
    w_index_q: kernels.Weight | None  # [index_heads * index_dim, q_lora_rank], CSA layers
    w_out_a: kernels.Weight  # [groups, output_lora_rank, heads * head_dim / groups]
    w_out_b: kernels.Weight  # [hidden, groups * output_lora_rank]
    q_norm: torch.Tensor  # [q_lora_rank]
    kv_norm: torch.Tensor  # [head_dim]
    sinks: torch.Tensor  # [heads]


@dataclass
class CompressorWeights:
    """One compressor's own weights, fp32; its projections are part of the layer's w_in. See kernels.compress."""

    position_bias: torch.Tensor  # [ratio, series * entry_dim]: two series in CSA layers, one in HCA layers
    norm: torch.Tensor  # [entry_dim]


class Attention:
    """One layer's attention. `compressor` for CSA and HCA layers, `index_compressor` for CSA."""

    def __init__(
        self,
        config: V4Config,
        layer: int,
        weights: AttentionWeights,
        compressor: CompressorWeights | None,
        index_compressor: CompressorWeights | None,
        rounding: Rounding,
    ) -> None:
        self.config = config
        self.kind = config.layer_kinds[layer]
        self.layer = layer
        self.layer_in_kind = config.layers_of(self.kind).index(layer)
        self.weights = weights
        self.compressor = compressor
        self.index_compressor = index_compressor
        self.rounding = rounding
        self.scale = config.head_dim**-0.5
        self.index_scale = (config.index_dim * config.index_heads) ** -0.5

    def run(self, x: torch.Tensor, batch: ForwardBatch, step: Step, cache: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """x [T, hidden] dt, normed -> the sublayer's output [T, hidden] dt. Reads and writes the cache."""
        config, weights, rope = self.config, self.weights, step.ropes[self.compressor is not None]
        latent, kv, *compressed = weights.w_in.run(x)
        latent = self.rounding.of_input(kernels.rms_norm(latent, weights.q_norm, config.norm_eps))
        q = kernels.linear(latent, weights.w_q).view(-1, config.num_heads, config.head_dim)
        kernels.head_norm_rope(q, rope.cos, rope.sin, config.norm_eps)
        kv = kernels.rms_norm_rope(kv, weights.kv_norm, rope.cos, rope.sin, config.norm_eps)
        kv = self.rounding.of_window(kv)
        window = cache[WINDOW]
        if window.dtype is not kv.dtype:
            kv = kv.to(window.dtype).to(kv.dtype)  # seen as the cache keeps it, however the prompt is cut into chunks
        entries = self._compress(latent, compressed, batch, step, cache)
        attended = kernels.attention(
            q, kv, batch, window, self.layer, config.window, weights.sinks, self.scale, rope.cos, rope.sin, entries
        )
        kernels.write_ring(kv, window, self.layer, batch)
        return self._project_out(attended)

    def _compress(
        self,
        latent: torch.Tensor,
        projected: list[torch.Tensor],
        batch: ForwardBatch,
        step: Step,
        cache: Mapping[str, torch.Tensor],
    ) -> kernels.Entries | None:
        """Closes the step's groups; the entries that the queries may see."""
        if self.compressor is None:
            return None
        ratio, entries = self.config.ratio(self.kind), cache[KV_OF_KIND[self.kind]]
        carry = cache[CARRY_OF_KIND[self.kind]]
        self._close_groups(self.compressor, projected[0], batch, step, carry, entries, self.rounding.of_compressed)
        selected = None
        if self.index_compressor is not None:
            keys = cache[INDEX]
            carry = cache[INDEX_CARRY]
            self._close_groups(self.index_compressor, projected[1], batch, step, carry, keys, self.rounding.of_index)
            if batch.max_context_len // ratio > self.config.index_topk:  # else every query sees all
                selected = self._select(latent, projected[2], batch, step.ropes[True], keys)
        return kernels.Entries(entries, self.layer_in_kind, ratio, selected)

    def _close_groups(
        self,
        compressor: CompressorWeights,
        rows: torch.Tensor,
        batch: ForwardBatch,
        step: Step,
        carry: torch.Tensor,
        entries: torch.Tensor,
        rounded: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        layer, frequencies, eps = self.layer_in_kind, step.ropes[True].frequencies, self.config.norm_eps
        bias, norm = compressor.position_bias, compressor.norm
        if self.rounding.cache is None:
            kernels.compress(rows, bias, batch, carry, layer, norm, frequencies, eps, entries, layer)
            return
        closing = step.closing(len(bias))
        room = make_room(closing, batch, entries.shape[2], entries.shape[3], rows.dtype)
        kernels.compress(rows, bias, room.batch, carry, layer, norm, frequencies, eps, room.pages, 0)
        write_entries(rounded(room.entries()), closing, batch, entries, layer)

    def _select(
        self, latent: torch.Tensor, head_weights: torch.Tensor, batch: ForwardBatch, rope: StepRope, keys: torch.Tensor
    ) -> torch.Tensor:
        """The indexer's choice of entries: [T, index_topk] int32."""
        config = self.config
        assert self.weights.w_index_q is not None
        q = kernels.linear(latent, self.weights.w_index_q).view(-1, config.index_heads, config.index_dim)
        q = self.rounding.of_index(kernels.head_norm_rope(q, rope.cos, rope.sin, None))
        weights = head_weights.float() * self.index_scale
        return kernels.select_entries(q, weights, batch, keys, self.layer_in_kind, config.csa_ratio, config.index_topk)

    def _project_out(self, attended: torch.Tensor) -> torch.Tensor:
        """The grouped low-rank output projection of [T, heads, head_dim]."""
        weights = self.weights
        num_groups, rank, depth = weights.w_out_a.shape
        latent = kernels.grouped_linear(attended.view(-1, num_groups, depth), weights.w_out_a)
        return kernels.linear(self.rounding.of_input(latent.view(-1, num_groups * rank)), weights.w_out_b)
