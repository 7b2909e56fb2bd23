"""Names and shapes of DeepSeek-V4's tensors in a checkpoint.

The published names are the project's own. transformers' `save_pretrained` writes a mixture of those and its own; it is
mapped to the published form before anything else looks at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config
from headrace_engine.models.names import Shape, Source, Stored, expert_shapes, hyper_connection_shapes, match
from headrace_engine.models.shards import Storage

_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\."), "embed."),
    (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^hc_head\.hc_"), "hc_head_"),
    (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
    (re.compile(r"\.weight_scale_inv$"), ".scale"),
)
_DRAFT = re.compile(r"^mtp\.")
_IMAGE = re.compile(r"^(vision|aligner)\.|^image_|\.ffn\.gate\.bias_vl$")

FP8_BLOCK = (128, 128)  # of the published checkpoints
_PUBLISHED = (
    (re.compile(r"\.tid2eid$"), Storage.I64),
    (re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$"), Storage.FP4),
    (re.compile(r"(\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|\.shared_experts\.w[123])\.weight$"), Storage.FP8),
    (re.compile(r"^mtp\.\d+\.(e_proj|h_proj|main_proj)\.weight$"), Storage.FP8),
    (re.compile(r"(^|\.)hc_\w+$|\.(ape|attn_sink|gate\.bias)$"), Storage.F32),
)


def published_storage(name: str) -> Storage:
    """How the published checkpoints store the tensor of this published name."""
    return next((storage for pattern, storage in _PUBLISHED if pattern.search(name)), Storage.BF16)


def published_name(name: str) -> str:
    """A checkpoint's tensor name in its published form."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def expected_shapes(config: V4Config) -> dict[str, Shape]:
    """Every tensor of the text model, by published name."""
    hidden, streams = config.hidden_size, config.num_streams
    shapes: dict[str, Shape] = {
        "embed.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
        "head.weight": (config.vocab_size, hidden),
        "hc_head_fn": (streams, streams * hidden),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
    }
    for layer in range(config.num_layers):
        parts = layer_shapes(config, layer)
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in parts.items()})
    return shapes


def layer_shapes(config: V4Config, layer: int) -> dict[str, Shape]:
    """One layer's tensors, by published name without the layer's prefix."""
    hidden, streams = config.hidden_size, config.num_streams
    shapes: dict[str, Shape] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    shapes.update(hyper_connection_shapes(streams, hidden))
    shapes.update({f"attn.{name}": shape for name, shape in _attention_shapes(config, layer).items()})
    shapes.update({f"ffn.{name}": shape for name, shape in _moe_shapes(config, layer).items()})
    return shapes


def _attention_shapes(config: V4Config, layer: int) -> dict[str, Shape]:
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
    kind = config.layer_kinds[layer]
    if kind is LayerKind.WINDOW:
        return shapes
    series = 2 if kind is LayerKind.CSA else 1
    shapes.update(_compressor_shapes("compressor", config.ratio(kind), series, dim, hidden))
    if kind is LayerKind.CSA:
        shapes["indexer.wq_b.weight"] = (config.index_heads * config.index_dim, latent)
        shapes["indexer.weights_proj.weight"] = (config.index_heads, hidden)
        shapes.update(_compressor_shapes("indexer.compressor", config.csa_ratio, 2, config.index_dim, hidden))
    return shapes


def _compressor_shapes(prefix: str, ratio: int, series: int, dim: int, hidden: int) -> dict[str, Shape]:
    return {
        f"{prefix}.wkv.weight": (series * dim, hidden),
        f"{prefix}.wgate.weight": (series * dim, hidden),
        f"{prefix}.ape": (ratio, series * dim),
        f"{prefix}.norm.weight": (dim,),
    }


def _moe_shapes(config: V4Config, layer: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"gate.weight": (config.num_experts, config.hidden_size)}
    if config.hash_layers[layer]:
        shapes["gate.tid2eid"] = (config.vocab_size, config.experts_per_token)
    else:
        shapes["gate.bias"] = (config.num_experts,)
    shapes.update(expert_shapes(config.num_experts, config.hidden_size, config.expert_dim))
    return shapes


def match_checkpoint(config: V4Config, stored: Iterable[Stored]) -> dict[str, Source]:
    """Published name -> source of every tensor; draft and image tensors are left out. Raises ModelError."""
    return match(
        expected_shapes(config),
        stored,
        published_name,
        lambda name: bool(_DRAFT.search(name) or _IMAGE.search(name)),
    )


def match_drafter(expected: Mapping[str, Shape], stored: Iterable[Stored]) -> dict[str, Source]:
    """As match_checkpoint, of the draft tensors alone."""
    return match(expected, stored, published_name, lambda name: not _DRAFT.search(name) or bool(_IMAGE.search(name)))
