"""DeepSeek-V4.1's attention (CSA2): one shared key/value head over a window of raw tokens and chosen entries.

A layer may make entries (Full), choose anew among those of a lower layer (Reindex), or take that layer's choice too
(Reuse); window-only layers have none of it. Formulas: DeepSeek-V4.1 report, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.models.access import PlainCache, Reads
from headrace_engine.models.deepseek_v41.cache import WINDOW, carry_group, entries_group, keys_group
from headrace_engine.models.deepseek_v41.compressor import pool, write_carry
from headrace_engine.models.deepseek_v41.config import LayerMode, V41Config
from headrace_engine.models.deepseek_v41.step import Step
from headrace_engine.models.projections import InputProjections
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.rounding import Rounding


@dataclass
class AttentionWeights:
    """One layer's tensors in the model dtype, norms and sinks in fp32; projections with one input are fused."""

    w_in: InputProjections  # q latent, kv, then index head weights (index sources), compressor's values | gates (Full)
    w_q: kernels.Weight  # [heads * head_dim, q_lora_rank]
    w_out_a: kernels.Weight  # [groups, output_lora_rank, heads * head_dim / groups]
    w_out_b: kernels.Weight  # [hidden, groups * output_lora_rank]
    q_norm: torch.Tensor  # [q_lora_rank]
    kv_norm: torch.Tensor  # [head_dim]
    sinks: torch.Tensor  # [heads]
    w_index_q: kernels.Weight | None = None  # [index_heads * index_dim, q_lora_rank], index sources


@dataclass
class CompressorWeights:
    """What only a kv source has; its projections of the layer's input are part of w_in. Norms in fp32."""

    norm: torch.Tensor  # [head_dim]
    w_key: kernels.Weight  # [index_dim, head_dim]
    key_norm: torch.Tensor  # [index_dim]


class Attention:
    """One layer's attention; `compressor` for Full layers."""

    def __init__(
        self,
        config: V41Config,
        layer: int,
        weights: AttentionWeights,
        compressor: CompressorWeights | None,
        rounding: Rounding,
    ) -> None:
        self.config, self.layer, self.weights, self.compressor = config, layer, weights, compressor
        self.rounding = rounding
        self.mode, self.ratio = config.mode(layer), config.ratios[layer]
        self.scale = config.head_dim**-0.5
        self.index_scale = (config.index_dim * config.index_heads) ** -0.5
        # Where the entries that this layer reads are, in the groups of its ratio.
        self.source = config.kv_sources_of(self.ratio).index(config.kv_source(layer)) if self.ratio else -1

    def run(self, x: torch.Tensor, batch: ForwardBatch, step: Step, cache: PlainCache) -> torch.Tensor:
        """x [T, hidden] dt, normed -> the sublayer's output [T, hidden] dt. Reads and writes cache and step."""
        config, weights, rope = self.config, self.weights, step.ropes[self.ratio > 0]
        latent, kv, *rest = weights.w_in.run(x)
        latent = self.rounding.of_input(kernels.rms_norm(latent, weights.q_norm, config.norm_eps))
        q = kernels.linear(latent, weights.w_q).view(-1, config.num_heads, config.head_dim)
        kernels.head_norm_rope(q, rope.cos, rope.sin, None)
        kv = kernels.rms_norm_rope(kv, weights.kv_norm, rope.cos, rope.sin, config.norm_eps)
        kv = cache.seen(self.rounding.of_window(kv), WINDOW)
        if self.mode is LayerMode.FULL:
            self._close_groups(rest[1], batch, step, cache)
        if self.mode in (LayerMode.FULL, LayerMode.REINDEX):
            self._choose(latent, rest[0], batch, step, cache)
        reads = Reads(entries_group(self.ratio), self.source, self.ratio, step.selected) if self.ratio else None
        attended = cache.attend(q, kv, WINDOW, self.layer, config.window, weights.sinks, self.scale, rope, reads)
        cache.keep_window(kv, WINDOW, self.layer)
        return self._project_out(attended)

    def _close_groups(self, rows: torch.Tensor, batch: ForwardBatch, step: Step, cache: PlainCache) -> None:
        """Writes the entries that this step completes and their index keys, which come from the unrotated entries."""
        compressor, ratio, eps = self.compressor, self.ratio, self.config.norm_eps
        assert compressor is not None
        closing, rope = step.closing[ratio], step.entry_ropes[ratio]
        if ratio > 1:
            carry = cache.tensors[carry_group(ratio)]
            values = pool(rows, closing, batch, carry, self.source).to(rows.dtype)
            write_carry(rows, batch, step.sequence, carry, self.source)
        else:
            values = rows if len(closing.tokens) == len(rows) else rows[closing.tokens]
        entries = kernels.rms_norm(values, compressor.norm, eps)
        keys = kernels.linear(entries, compressor.w_key)
        keys = kernels.rms_norm_rope(keys, compressor.key_norm, rope.cos, rope.sin, eps)
        kernels.head_norm_rope(entries.unsqueeze(1), rope.cos, rope.sin, None)
        entries, keys = self.rounding.of_compressed(entries), self.rounding.of_keys(keys)
        cache.keep_compressed(entries, closing, entries_group(ratio), self.source)
        cache.keep_keys(keys, closing, keys_group(ratio), self.source)

    def _choose(
        self, latent: torch.Tensor, head_weights: torch.Tensor, batch: ForwardBatch, step: Step, cache: PlainCache
    ) -> None:
        """Puts the indexer's choice of entries into the step, and the candidate blocks if this layer makes them."""
        config, ratio, candidates = self.config, self.ratio, self.config.candidates
        num_entries = batch.max_context_len // ratio
        if num_entries <= config.index_topk:  # every query sees all, in every layer above too
            step.selected = step.blocks = None
            return
        assert self.weights.w_index_q is not None
        rope = step.ropes[True]
        q = kernels.linear(latent, self.weights.w_index_q).view(-1, config.index_heads, config.index_dim)
        q = self.rounding.of_queries(kernels.head_norm_rope(q, rope.cos, rope.sin, None))
        weights = head_weights.float() * self.index_scale
        keys = cache.keys(keys_group(ratio), self.source, ratio, q.dtype)
        asked = (q, weights, keys.batch, keys.pages, keys.layer, ratio)
        if candidates is not None and step.blocks is not None and self.layer > candidates.layer:
            step.selected = kernels.select_within_runs(*asked, config.index_topk, step.blocks, candidates.block_size)
            return
        if candidates is not None and self.layer == candidates.layer:
            step.blocks = None
            if num_entries > candidates.num_blocks * candidates.block_size:  # otherwise they would hold everything
                settings = (config.index_topk, candidates.block_size, candidates.num_blocks)
                step.selected, step.blocks = kernels.select_entries_and_runs(*asked, *settings)
                return
        step.selected = kernels.select_entries(*asked, config.index_topk)

    def _project_out(self, attended: torch.Tensor) -> torch.Tensor:
        """The grouped low-rank output projection of [T, heads, head_dim]."""
        weights = self.weights
        num_groups, rank, depth = weights.w_out_a.shape
        latent = kernels.grouped_linear(attended.view(-1, num_groups, depth), weights.w_out_a)
        return kernels.linear(self.rounding.of_input(latent.view(-1, num_groups * rank)), weights.w_out_b)
