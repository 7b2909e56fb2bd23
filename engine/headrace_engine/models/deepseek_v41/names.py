"""Names and shapes of DeepSeek-V4.1's tensors in a checkpoint, in published form."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from headrace_engine.models.deepseek_v41.config import EngramConfig, LayerMode, V41Config
from headrace_engine.models.names import Shape, Source, Stored, expert_shapes, hyper_connection_shapes, match
from headrace_engine.models.shards import Storage

_DRAFT = re.compile(r"^mtp\.")
_IMAGE = re.compile(r"^(vision|aligner)\.|^image_|\.ffn\.gate\.bias_vl$")

FP8_BLOCK = (32, 32)  # of the published checkpoints
_FP8_NAMES = r"(\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|\.shared_experts\.w[123]|\.engram\.wkv)\.weight$"
_PUBLISHED = (
    (re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$"), Storage.FP4),
    (re.compile(_FP8_NAMES), Storage.FP8),
    (re.compile(r"^mtp\.\d+\.main_proj\.weight$"), Storage.FP8),
    (re.compile(r"\.engram\.embed\.weight$"), Storage.FP8_ROWS),
    (re.compile(r"(^|\.)hc_\w+$|\.(attn_sink|gate\.bias)$"), Storage.F32),
)

log = logging.getLogger(__name__)


def published_storage(name: str) -> Storage:
    """How the published checkpoint stores the tensor of this published name."""
    return next((storage for pattern, storage in _PUBLISHED if pattern.search(name)), Storage.BF16)


def match_checkpoint(config: V41Config, stored: Iterable[Stored]) -> dict[str, Source]:
    """Published name -> source of every tensor of the text model; draft and image tensors are left out.

    Raises ModelError listing by name what does not fit (`names.match`).
    """
    stored = list(stored)
    num_image = sum(1 for item in stored if _IMAGE.search(item.name))
    if num_image:
        log.info("%d image tensors are not loaded: only text is served", num_image)
    return match(expected_shapes(config), stored, str, lambda name: bool(_DRAFT.search(name) or _IMAGE.search(name)))


def match_drafter(expected: Mapping[str, Shape], stored: Iterable[Stored]) -> dict[str, Source]:
    """As match_checkpoint, of the draft tensors alone."""
    return match(expected, stored, str, lambda name: not _DRAFT.search(name) or bool(_IMAGE.search(name)))


def expected_shapes(config: V41Config) -> dict[str, Shape]:
    """Every tensor of the text model, by published name."""
    shapes: dict[str, Shape] = {
        "embed.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
        "head.weight": (config.vocab_size, config.hidden_size),
    }
    for layer in range(config.num_layers):
        parts = layer_shapes(config, layer)
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in parts.items()})
    return shapes


def layer_shapes(config: V41Config, layer: int) -> dict[str, Shape]:
    """One layer's tensors, by published name without the layer's prefix."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    shapes.update(hyper_connection_shapes(config.num_streams, hidden))
    shapes.update({f"attn.{name}": shape for name, shape in _attention_shapes(config, layer).items()})
    moe = {"gate.weight": (config.num_experts, hidden), "gate.bias": (config.num_experts,)}
    moe.update(expert_shapes(config.num_experts, hidden, config.expert_dim))
    shapes.update({f"ffn.{name}": shape for name, shape in moe.items()})
    if config.engram is not None and layer in config.engram.layers:
        parts = _engram_shapes(config, config.engram, layer)
        shapes.update({f"engram.{name}": shape for name, shape in parts.items()})
    return shapes


def _attention_shapes(config: V41Config, layer: int) -> dict[str, Shape]:
    hidden, latent, dim = config.hidden_size, config.q_lora_rank, config.head_dim
    num_values = config.num_heads * dim
    groups, output_rank = config.num_output_groups, config.output_lora_rank
    shapes: dict[str, Shape] = {
        "wq_a.weight": (latent, hidden),
        "q_norm.weight": (latent,),
        "wq_b.weight": (num_values, latent),
        "wkv.weight": (dim, hidden),
        "kv_norm.weight": (dim,),
        "wo_a.weight": (groups * output_rank, num_values // groups),
        "wo_b.weight": (hidden, groups * output_rank),
        "attn_sink": (config.num_heads,),
    }
    mode = config.mode(layer)
    if mode in (LayerMode.FULL, LayerMode.REINDEX):
        shapes["indexer.wq_b.weight"] = (config.index_heads * config.index_dim, latent)
        shapes["indexer.weights_proj.weight"] = (config.index_heads, hidden)
    if mode is LayerMode.FULL:
        shapes["indexer.wk.weight"] = (config.index_dim, dim)
        shapes["indexer.k_norm.weight"] = (config.index_dim,)
        shapes["compressor.wkv.weight"] = (dim, hidden)
        shapes["compressor.norm.weight"] = (dim,)
        if config.ratios[layer] > 1:
            shapes["compressor.wgate.weight"] = (dim, hidden)
    return shapes


def _engram_shapes(config: V41Config, engram: EngramConfig, layer: int) -> dict[str, Shape]:
    streams, hidden = config.num_streams, config.hidden_size
    return {
        "embed.weight": (engram.num_rows[engram.layers.index(layer)], engram.row_dim),
        "wkv.weight": ((streams + 1) * hidden, engram.num_hashes * engram.row_dim),
        "q_weight": (streams, hidden),
        "k_weight": (streams, hidden),
    }
