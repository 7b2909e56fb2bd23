"""DeepSeek-V4.1's hyper-parameters from config.json, whose `text_config` holds those of the text model. No torch here.

What the report calls the causal encoder-decoder is in the lists of sources: a layer reads the compressed entries of the
nearest kv source at or below it, and the choice among them of the nearest index source at or below it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_engine.models.config_values import (
    RopeConfig,
    check_quantization,
    check_variants,
    number,
    positive,
    weights_dtype,
    yarn,
)
from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import ModelInfo, eos_token_ids


class LayerMode(enum.Enum):
    """What a layer does about compressed entries."""

    WINDOW = "window"  # attends raw tokens only
    FULL = "full"  # makes entries and index keys, and chooses among them
    REINDEX = "reindex"  # chooses anew among a lower layer's entries, with an index query of its own
    REUSE = "reuse"  # takes both the entries and the choice of lower layers


@dataclass(frozen=True)
class CandidateConfig:
    """Two-level selection: index sources above `layer` choose only within the blocks that `layer` scored best."""

    layer: int  # a kv source
    num_blocks: int
    block_size: int  # entries


@dataclass(frozen=True)
class EngramConfig:
    """Hashed n-gram memory at the entry of some layers."""

    layers: tuple[int, ...]
    num_rows: tuple[int, ...]  # of each layer's table
    max_ngram: int  # tokens; n-grams of 2 .. max_ngram are looked up
    num_heads: int  # hash functions of each n-gram size
    row_dim: int
    bucket_base: int  # the prime of every hash function is above it, or is it
    pad_token_id: int  # stands for tokens before the sequence
    compressed_vocab_size: int  # how many different tokens are left after normalisation

    @property
    def num_hashes(self) -> int:
        """Rows that a token looks up in one table."""
        return (self.max_ngram - 1) * self.num_heads

    @property
    def num_previous_tokens(self) -> int:
        """Tokens before a token that its hashes depend on."""
        return self.max_ngram - 1


@dataclass(frozen=True)
class V41Config:
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int  # the last dims of a head rotate
    q_lora_rank: int
    num_output_groups: int
    output_lora_rank: int
    ratios: tuple[int, ...]  # tokens per compressed entry by layer, 0 for window-only layers
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidates: CandidateConfig | None
    window: int  # token t sees raw tokens t - window + 1 .. t
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    expert_dim: int
    routed_scaling: float
    swiglu_limit: float
    num_streams: int
    sinkhorn_iterations: int
    hc_eps: float
    norm_eps: float
    engram: EngramConfig | None
    max_position: int
    window_rope: RopeConfig  # of window-only layers
    compressed_rope: RopeConfig  # of all others
    image_token_id: int | None
    dtype: str  # the checkpoint's own

    @property
    def num_layers(self) -> int:
        return len(self.ratios)

    @property
    def block_multiple(self) -> int:
        return math.lcm(*(ratio for ratio in self.ratios if ratio))

    def mode(self, layer: int) -> LayerMode:
        if not self.ratios[layer]:
            return LayerMode.WINDOW
        if layer in self.kv_sources:
            return LayerMode.FULL
        return LayerMode.REINDEX if layer in self.index_sources else LayerMode.REUSE

    def kv_source(self, layer: int) -> int:
        """The layer whose entries a compressed layer reads."""
        return max(source for source in self.kv_sources if source <= layer)

    def kv_sources_of(self, ratio: int) -> tuple[int, ...]:
        return tuple(source for source in self.kv_sources if self.ratios[source] == ratio)


def describe(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelInfo:
    """The model's short description. Raises ModelError."""
    parsed = parse(config)
    ids = {**config.get("text_config", {}), **config}
    bos = generation_config.get("bos_token_id", ids.get("bos_token_id"))
    return ModelInfo(
        architecture="deepseek_v41",
        vocab_size=parsed.vocab_size,
        max_position=parsed.max_position,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=eos_token_ids(ids, generation_config),
        block_multiple=parsed.block_multiple,
        num_experts=parsed.num_experts,
        dtype=parsed.dtype,
        image_token_id=parsed.image_token_id,
    )


def parse(config: Mapping[str, Any]) -> V41Config:
    """Raises ModelError naming the key."""
    text = _text_config(config)
    num_layers = positive(text, "num_hidden_layers")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    parsed = V41Config(
        vocab_size=positive(text, "vocab_size"),
        hidden_size=positive(text, "hidden_size"),
        num_heads=positive(text, "num_attention_heads"),
        head_dim=positive(text, "head_dim"),
        rope_dim=positive(text, "qk_rope_head_dim"),
        q_lora_rank=positive(text, "q_lora_rank"),
        num_output_groups=positive(text, "o_groups"),
        output_lora_rank=positive(text, "o_lora_rank"),
        ratios=_ratios(text, num_layers),
        kv_sources=_layers(text, "kv_source_layer_ids", num_layers),
        index_sources=_layers(text, "index_source_layer_ids", num_layers),
        candidates=_candidates(text, num_layers),
        window=positive(text, "sliding_window"),
        index_heads=positive(text, "index_n_heads"),
        index_dim=positive(text, "index_head_dim"),
        index_topk=positive(text, "index_topk"),
        num_experts=positive(text, "n_routed_experts"),
        experts_per_token=positive(text, "num_experts_per_tok"),
        expert_dim=positive(text, "moe_intermediate_size"),
        routed_scaling=number(text, "routed_scaling_factor", 1.5),
        swiglu_limit=number(text, "swiglu_limit", 10.0),
        num_streams=positive(text, "hc_mult", 4),
        sinkhorn_iterations=positive(text, "hc_sinkhorn_iters", 20),
        hc_eps=number(text, "hc_eps", 1e-6),
        norm_eps=number(text, "rms_norm_eps", 1e-20),
        engram=_engram(text, num_layers),
        max_position=positive(text, "max_position_embeddings"),
        window_rope=RopeConfig(number(text, "rope_theta", 10000.0)),
        compressed_rope=RopeConfig(number(text, "compress_rope_theta", 160000.0), yarn(scaling)),
        image_token_id=config.get("image_token_id"),
        dtype=weights_dtype({**config, **text}),
    )
    _check_sources(parsed)
    _check_shapes(parsed)
    return parsed


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    model_type = config.get("model_type")
    if model_type != "deepseek_v41":
        raise ModelError(f"config.json: model_type {model_type!r} is not supported (supported: 'deepseek_v41')")
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError("config.json: deepseek_v41 keeps its hyper-parameters in text_config, which is missing")
    for each in (config, text):
        check_quantization(each.get("quantization_config"))
    check_variants(text)
    return text


def _ratios(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    ratios = text.get("compress_ratios")
    if not isinstance(ratios, list) or not all(type(ratio) is int and ratio >= 0 for ratio in ratios):
        raise ModelError(f"config.json: compress_ratios must list a number of tokens per layer, got {ratios!r}")
    if len(ratios) < num_layers:
        raise ModelError(f"config.json: compress_ratios has {len(ratios)} items for {num_layers} layers")
    return tuple(ratios[:num_layers])  # what follows belongs to draft layers


def _layers(text: Mapping[str, Any], key: str, num_layers: int) -> tuple[int, ...]:
    layers = text.get(key)
    if not isinstance(layers, list) or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise ModelError(f"config.json: {key} must be a list of layer numbers, got {layers!r}")
    if layers != sorted(set(layers)):
        raise ModelError(f"config.json: {key} must ascend, got {layers}")
    return tuple(layer for layer in layers if layer < num_layers)


def _candidates(text: Mapping[str, Any], num_layers: int) -> CandidateConfig | None:
    layer = text.get("candidate_source_layer_id", -1)
    if type(layer) is not int:
        raise ModelError(f"config.json: candidate_source_layer_id must be a layer number or -1, got {layer!r}")
    if not 0 <= layer < num_layers:
        return None
    return CandidateConfig(layer, positive(text, "candidate_topk_blocks"), positive(text, "candidate_block_size"))


def _engram(text: Mapping[str, Any], num_layers: int) -> EngramConfig | None:
    layers = _layers(text, "engram_layer_ids", num_layers) if text.get("engram_layer_ids") else ()
    if not layers:
        return None
    rows = text.get("engram_num_embeddings")
    if not isinstance(rows, list) or len(rows) != len(text["engram_layer_ids"]):
        raise ModelError("config.json: engram_num_embeddings must give a number of rows for each of engram_layer_ids")
    pad = text.get("engram_pad_token_id", text.get("engram_pad_id"))  # one of the two names is in use
    if type(pad) is not int or not 0 <= pad < positive(text, "vocab_size"):
        raise ModelError(f"config.json: engram_pad_token_id must be a token id, got {pad!r}")
    engram = EngramConfig(
        layers=layers,
        num_rows=tuple(rows[: len(layers)]),
        max_ngram=positive(text, "engram_max_ngram_size"),
        num_heads=positive(text, "engram_n_heads"),
        row_dim=positive(text, "engram_head_dim"),
        bucket_base=positive(text, "engram_vocab_size"),
        pad_token_id=pad,
        compressed_vocab_size=positive(text, "engram_compressed_vocab_size"),
    )
    if engram.max_ngram < 2:
        raise ModelError("config.json: engram_max_ngram_size must be at least 2")
    return engram


def _check_sources(config: V41Config) -> None:
    if not set(config.kv_sources) <= set(config.index_sources):
        raise ModelError("config.json: every one of kv_source_layer_ids must be in index_source_layer_ids too")
    for layer, ratio in enumerate(config.ratios):
        if not ratio and layer in config.index_sources:
            raise ModelError(f"config.json: layer {layer} has compress ratio 0 and cannot be a source")
        if ratio and (layer < min(config.kv_sources, default=layer + 1)):
            raise ModelError(f"config.json: compressed layer {layer} has no kv source at or below it")
        if ratio and config.ratios[config.kv_source(layer)] != ratio:
            raise ModelError(f"config.json: layer {layer} and its kv source {config.kv_source(layer)} differ in ratio")
    candidates = config.candidates
    if candidates is None:
        return
    if candidates.layer != max(config.kv_sources, default=-1):
        raise ModelError("config.json: candidate_source_layer_id must be the last of kv_source_layer_ids")
    # The newest block may hold a single entry; the choice must still find as many entries as it is to take.
    if (candidates.num_blocks - 1) * candidates.block_size + 1 < config.index_topk:
        raise ModelError("config.json: candidate_topk_blocks * candidate_block_size must exceed index_topk")


def _check_shapes(config: V41Config) -> None:
    if config.rope_dim % 2 or config.rope_dim > min(config.head_dim, config.index_dim):
        raise ModelError(f"config.json: {config.rope_dim} rotary dims do not fit into the heads")
    if config.num_heads % config.num_output_groups:
        raise ModelError(f"config.json: {config.num_heads} heads do not split into {config.num_output_groups} o_groups")
    if config.experts_per_token > config.num_experts:
        raise ModelError("config.json: num_experts_per_tok is larger than n_routed_experts")
    if config.hidden_size % 8 or config.expert_dim % 8:
        raise ModelError("config.json: hidden_size and moe_intermediate_size must be multiples of 8 (grouped products)")
