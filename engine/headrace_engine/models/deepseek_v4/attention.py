"""DeepSeek-V4's attention: one shared key/value head over a window of raw tokens and compressed entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.models.access import PlainCache, Reads
from headrace_engine.models.closing import make_room
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

    def run(self, x: torch.Tensor, batch: ForwardBatch, step: Step, cache: PlainCache) -> torch.Tensor:
        """x [T, hidden] dt, normed -> the sublayer's output [T, hidden] dt. Reads and writes the cache."""
        config, weights, rope = self.config, self.weights, step.ropes[self.compressor is not None]
        latent, kv, *compressed = weights.w_in.run(x)
        latent = self.rounding.of_input(kernels.rms_norm(latent, weights.q_norm, config.norm_eps))
        q = kernels.linear(latent, weights.w_q).view(-1, config.num_heads, config.head_dim)
        kernels.head_norm_rope(q, rope.cos, rope.sin, config.norm_eps)
        kv = kernels.rms_norm_rope(kv, weights.kv_norm, rope.cos, rope.sin, config.norm_eps)
        kv = cache.seen(self.rounding.of_window(kv), WINDOW)
        reads = self._compress(latent, compressed, batch, step, cache)
        attended = cache.attend(q, kv, WINDOW, self.layer, config.window, weights.sinks, self.scale, rope, reads)
        cache.keep_window(kv, WINDOW, self.layer)
        return self._project_out(attended)

    def _compress(
        self,
        latent: torch.Tensor,
        projected: list[torch.Tensor],
        batch: ForwardBatch,
        step: Step,
        cache: PlainCache,
    ) -> Reads | None:
        """Closes the step's groups; the entries that the queries may see."""
        if self.compressor is None:
            return None
        ratio, carry = self.config.ratio(self.kind), cache.tensors[CARRY_OF_KIND[self.kind]]
        group = KV_OF_KIND[self.kind]
        closed = self._close_groups(self.compressor, projected[0], batch, step, carry, group, cache)
        if closed is not None:
            entries = self.rounding.of_compressed(closed)
            cache.keep_compressed(entries, step.closing(ratio), group, self.layer_in_kind)
        selected = None
        if self.index_compressor is not None:
            carry = cache.tensors[INDEX_CARRY]
            closed = self._close_groups(self.index_compressor, projected[1], batch, step, carry, INDEX, cache)
            if closed is not None:
                cache.keep_keys(self.rounding.of_keys(closed), step.closing(ratio), INDEX, self.layer_in_kind)
            if batch.max_context_len // ratio > self.config.index_topk:  # else every query sees all
                selected = self._select(latent, projected[2], step.ropes[True], cache)
        return Reads(group, self.layer_in_kind, ratio, selected)

    def _close_groups(
        self,
        compressor: CompressorWeights,
        rows: torch.Tensor,
        batch: ForwardBatch,
        step: Step,
        carry: torch.Tensor,
        group: str,
        cache: PlainCache,
    ) -> torch.Tensor | None:
        """The entries [C, n] dt of the groups that this step closes; None: they are in the cache already, as made."""
        layer, frequencies, eps = self.layer_in_kind, step.ropes[True].frequencies, self.config.norm_eps
        bias, norm = compressor.position_bias, compressor.norm
        if self.rounding.cache is None and not cache.is_packed:
            tensor = cache.tensors[group]
            kernels.compress(rows, bias, batch, carry, layer, norm, frequencies, eps, tensor, layer)
            return None
        room = make_room(step.closing(len(bias)), batch, cache.per_block(KV_OF_KIND[self.kind]), len(norm), rows.dtype)
        kernels.compress(rows, bias, room.batch, carry, layer, norm, frequencies, eps, room.pages, 0)
        return room.entries()

    def _select(
        self, latent: torch.Tensor, head_weights: torch.Tensor, rope: StepRope, cache: PlainCache
    ) -> torch.Tensor:
        """The indexer's choice of entries: [T, index_topk] int32."""
        config = self.config
        assert self.weights.w_index_q is not None
        q = kernels.linear(latent, self.weights.w_index_q).view(-1, config.index_heads, config.index_dim)
        q = self.rounding.of_queries(kernels.head_norm_rope(q, rope.cos, rope.sin, None))
        weights = head_weights.float() * self.index_scale
        keys = cache.keys(INDEX, self.layer_in_kind, config.csa_ratio, q.dtype)
        return kernels.select_entries(
            q, weights, keys.batch, keys.pages, keys.layer, config.csa_ratio, config.index_topk
        )

    def _project_out(self, attended: torch.Tensor) -> torch.Tensor:
        """The grouped low-rank output projection of [T, heads, head_dim]."""
        weights = self.weights
        num_groups, rank, depth = weights.w_out_a.shape
        latent = kernels.grouped_linear(attended.view(-1, num_groups, depth), weights.w_out_a)
        return kernels.linear(self.rounding.of_input(latent.view(-1, num_groups * rank)), weights.w_out_b)
