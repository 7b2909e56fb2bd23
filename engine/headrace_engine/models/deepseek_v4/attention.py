"""DeepSeek-V4's attention: one shared key/value head over a window of raw tokens and compressed entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace_engine.models.deepseek_v4 import attention_ops, ops
from headrace_engine.models.deepseek_v4.cache import CARRY_OF_KIND, INDEX, INDEX_CARRY, KV_OF_KIND, WINDOW
from headrace_engine.models.deepseek_v4.compressor import Compressor
from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config
from headrace_engine.models.deepseek_v4.plan import Chunk, StepPlan, layer_view


@dataclass
class AttentionWeights:
    """One layer's tensors in the model dtype, norms and sinks in fp32; projections with one input are fused."""

    w_in: torch.Tensor  # [sum of in_splits, hidden]: everything that reads the layer's input
    in_splits: list[int]  # q latent, kv, compressor (values, gates), index (values, gates, head weights)
    w_q: torch.Tensor  # [heads * head_dim (+ index_heads * index_dim), q_lora_rank]: everything that reads the q latent
    w_out_a: torch.Tensor  # [groups, output_lora_rank, heads * head_dim / groups]
    w_out_b: torch.Tensor  # [hidden, groups * output_lora_rank]
    q_norm: torch.Tensor  # [q_lora_rank]
    kv_norm: torch.Tensor  # [head_dim]
    sinks: torch.Tensor  # [heads]


class Attention:
    """One layer's attention. `compressor` for CSA and HCA layers, `index_compressor` for CSA."""

    def __init__(
        self,
        config: V4Config,
        layer: int,
        weights: AttentionWeights,
        compressor: Compressor | None,
        index_compressor: Compressor | None,
    ) -> None:
        self.config = config
        self.kind = config.layer_kinds[layer]
        self.layer = layer
        self.layer_in_kind = config.layers_of(self.kind).index(layer)
        self.weights = weights
        self.compressor = compressor
        self.index_compressor = index_compressor
        self.scale = config.head_dim**-0.5
        self.index_scale = (config.index_dim * config.index_heads) ** -0.5

    def run(
        self, x: torch.Tensor, positions: torch.Tensor, plan: StepPlan, cache: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """x [T, hidden] dt, normed -> the sublayer's output [T, hidden] dt. Reads and writes the cache."""
        config, weights = self.config, self.weights
        cos, sin = plan.token_rope[self.compressor is not None]
        latent, kv, *compressed = torch.split(F.linear(x, weights.w_in), weights.in_splits, dim=-1)
        latent = ops.rms_norm(latent, weights.q_norm, config.norm_eps)
        num_q = config.num_heads * config.head_dim
        q, index_q = F.linear(latent, weights.w_q).tensor_split([num_q], dim=-1)
        q = ops.rms_norm(q.reshape(-1, config.num_heads, config.head_dim), None, config.norm_eps)
        q = ops.rope(q, cos, sin)
        kv = ops.rope(ops.rms_norm(kv, weights.kv_norm, config.norm_eps), cos, sin)

        self._compress(compressed, positions, plan, cache)
        choose = None
        if self.index_compressor is not None:
            index_q = ops.rope(index_q.reshape(-1, config.index_heads, config.index_dim), cos, sin)
            choose = _Indexer(self, index_q, compressed[-1].float() * self.index_scale, cache)
        attended = self._attend(q, kv, choose, plan, cache)
        ops.rope(attended, cos, sin, inverse=True)  # values carry their rotation; undo it at the query's position
        return self._project_out(attended)

    def _compress(
        self,
        projected: list[torch.Tensor],
        positions: torch.Tensor,
        plan: StepPlan,
        cache: Mapping[str, torch.Tensor],
    ) -> None:
        if self.compressor is None:
            return
        step = plan.compression[self.kind]
        carry, entries = self._view(cache, CARRY_OF_KIND[self.kind]), self._view(cache, KV_OF_KIND[self.kind])
        self.compressor.run(projected[0], projected[1], positions, step, carry, entries)
        if self.index_compressor is not None:
            carry, entries = self._view(cache, INDEX_CARRY), self._view(cache, INDEX)
            self.index_compressor.run(projected[2], projected[3], positions, step, carry, entries)

    def _attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indexer: _Indexer | None,
        plan: StepPlan,
        cache: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """[T, heads, head_dim]: every token over its window and its entries; writes the window ring."""
        window = layer_view(cache[WINDOW], self.layer)
        entries = None if self.compressor is None else self._view(cache, KV_OF_KIND[self.kind])
        kv = kv.to(window.dtype)  # a token is seen as the cache keeps it, however the prompt is cut into chunks
        histories = [window.index_select(0, chunk.history_rows) for chunk in plan.chunks]
        window.index_copy_(0, plan.window_write.target, kv.index_select(0, plan.window_write.source))

        outputs = torch.empty_like(q)
        for chunk, history in zip(plan.chunks, histories, strict=True):
            keys = torch.cat([history, kv[chunk.rows]]).to(q.dtype)
            outputs[chunk.rows] = self._attend_chunk(q[chunk.rows], keys, entries, indexer, chunk)
        if plan.decode_rows.numel():
            entry_rows = plan.decode_entry_rows.get(self.kind)
            if indexer is not None and entry_rows is not None:
                entry_rows = indexer.choose_rows(plan.decode_rows, entry_rows)
            outputs[plan.decode_rows] = attention_ops.attend_rows(
                q[plan.decode_rows],
                window,
                plan.decode_window_rows,
                entries,
                entry_rows,
                self.weights.sinks,
                self.scale,
            )
        return outputs

    def _attend_chunk(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        entries: torch.Tensor | None,
        indexer: _Indexer | None,
        chunk: Chunk,
    ) -> torch.Tensor:
        chunk_entries = None
        if entries is not None:
            chunk_entries = entries.index_select(0, chunk.entry_rows[self.kind]).to(q.dtype)
        return attention_ops.attend_chunk(
            q,
            keys,
            self.config.window,
            chunk_entries,
            self.config.ratio(self.kind),
            chunk.first_position,
            None if indexer is None else indexer.choose_chunk(chunk),
            self.weights.sinks,
            self.scale,
        )

    def _project_out(self, attended: torch.Tensor) -> torch.Tensor:
        """The grouped low-rank output projection of [T, heads, head_dim]."""
        by_group = (attended.shape[0], *self.weights.w_out_a.shape[::2])  # [T, groups, heads / groups * head_dim]
        grouped = attended.reshape(by_group).transpose(0, 1)
        latent = torch.bmm(grouped, self.weights.w_out_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        return F.linear(latent, self.weights.w_out_b)

    def _view(self, cache: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        return layer_view(cache[name], self.layer_in_kind)


@dataclass
class _Indexer:
    """One CSA layer's choice of entries. While there are no more than top-k, all are chosen and nothing is scored."""

    attention: Attention
    q: torch.Tensor  # [T, index_heads, index_dim] dt, rotated
    weights: torch.Tensor  # [T, index_heads] fp32, scaled
    cache: Mapping[str, torch.Tensor]

    def choose_rows(self, tokens: torch.Tensor, entry_rows: torch.Tensor) -> torch.Tensor:
        """Paged rows of the chosen entries of single-token sequences, [D, at most topk], of [D, E]; -1 = none."""
        topk = self.attention.config.index_topk
        if entry_rows.shape[1] <= topk:
            return entry_rows
        keys = self.attention._view(self.cache, INDEX)
        chosen = attention_ops.index_rows(self.q[tokens], self.weights[tokens], keys, entry_rows, topk)
        return entry_rows.gather(1, chosen.clamp(min=0)).where(chosen >= 0, -1)

    def choose_chunk(self, chunk: Chunk) -> torch.Tensor | None:
        """Entry numbers [Q, topk] of a chunk's queries, -1 = none; None: all that a query may see."""
        config = self.attention.config
        rows = chunk.entry_rows[LayerKind.CSA]
        if rows.shape[0] <= config.index_topk:
            return None
        keys = self.attention._view(self.cache, INDEX).index_select(0, rows).to(self.q.dtype)
        return attention_ops.index_chunk(
            self.q[chunk.rows],
            self.weights[chunk.rows],
            keys,
            config.csa_ratio,
            chunk.first_position,
            config.index_topk,
        )
