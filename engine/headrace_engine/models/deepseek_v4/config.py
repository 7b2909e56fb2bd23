"""DeepSeek-V4's hyper-parameters, from either form of config.json.

The published form is flat (`compress_ratios`, `num_hash_layers`, `rope_scaling`); transformers rewrites it
(`layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters`). Both give the same `V4Config`. No torch here.
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


class LayerKind(enum.StrEnum):
    """What a layer attends besides its window of raw tokens (values: transformers' names)."""

    WINDOW = "sliding_attention"  # nothing
    CSA = "compressed_sparse_attention"  # the indexer's choice of entries
    HCA = "heavily_compressed_attention"  # every entry


_KIND_OF_RATIO = {0: LayerKind.WINDOW, 4: LayerKind.CSA, 128: LayerKind.HCA}
_DEFAULT_RATIOS = {LayerKind.CSA: 4, LayerKind.HCA: 128}
_DEFAULT_NUM_HASH_LAYERS = 3


@dataclass(frozen=True)
class V4Config:
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int  # the last dims of a head rotate
    q_lora_rank: int
    num_output_groups: int
    output_lora_rank: int
    layer_kinds: tuple[LayerKind, ...]
    hash_layers: tuple[bool, ...]  # routed by token id instead of by score
    csa_ratio: int  # tokens per compressed entry
    hca_ratio: int
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
    max_position: int
    window_rope: RopeConfig  # of layers that only have a window
    compressed_rope: RopeConfig  # of layers with a compressor
    dtype: str  # the checkpoint's own

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def layers_of(self, *kinds: LayerKind) -> tuple[int, ...]:
        return tuple(layer for layer, kind in enumerate(self.layer_kinds) if kind in kinds)

    def ratio(self, kind: LayerKind) -> int:
        """Tokens per compressed entry of a CSA or HCA layer."""
        return self.csa_ratio if kind is LayerKind.CSA else self.hca_ratio

    @property
    def block_multiple(self) -> int:
        compressed = {kind for kind in self.layer_kinds if kind is not LayerKind.WINDOW}
        return math.lcm(*(self.ratio(kind) for kind in compressed))


def describe(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelInfo:
    """The model's short description. Raises ModelError."""
    parsed = parse(config)
    bos = generation_config.get("bos_token_id", config.get("bos_token_id"))
    return ModelInfo(
        architecture="deepseek_v4",
        vocab_size=parsed.vocab_size,
        max_position=parsed.max_position,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=eos_token_ids(config, generation_config),
        block_multiple=parsed.block_multiple,
        num_experts=parsed.num_experts,
        dtype=parsed.dtype,
    )


def parse(config: Mapping[str, Any]) -> V4Config:
    """Both forms of config.json to one V4Config. Raises ModelError naming the key."""
    _check_supported(config)
    num_layers = positive(config, "num_hidden_layers")
    kinds = _layer_kinds(config, num_layers)
    rates = config.get("compress_rates") or {}
    ratios = {kind: int(rates.get(kind.value, default)) for kind, default in _DEFAULT_RATIOS.items()}
    head_dim = positive(config, "head_dim")
    window_rope, compressed_rope = _ropes(config)
    parsed = V4Config(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        num_heads=positive(config, "num_attention_heads"),
        head_dim=head_dim,
        rope_dim=_rope_dim(config, head_dim),
        q_lora_rank=positive(config, "q_lora_rank"),
        num_output_groups=positive(config, "o_groups"),
        output_lora_rank=positive(config, "o_lora_rank"),
        layer_kinds=kinds,
        hash_layers=_hash_layers(config, num_layers),
        csa_ratio=ratios[LayerKind.CSA],
        hca_ratio=ratios[LayerKind.HCA],
        window=positive(config, "sliding_window"),
        index_heads=positive(config, "index_n_heads"),
        index_dim=positive(config, "index_head_dim"),
        index_topk=positive(config, "index_topk"),
        num_experts=positive(config, "n_routed_experts"),
        experts_per_token=positive(config, "num_experts_per_tok"),
        expert_dim=positive(config, "moe_intermediate_size"),
        routed_scaling=number(config, "routed_scaling_factor", 1.5),
        swiglu_limit=number(config, "swiglu_limit", 10.0),
        num_streams=positive(config, "hc_mult", 4),
        sinkhorn_iterations=positive(config, "hc_sinkhorn_iters", 20),
        hc_eps=number(config, "hc_eps", 1e-6),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        max_position=positive(config, "max_position_embeddings"),
        window_rope=window_rope,
        compressed_rope=compressed_rope,
        dtype=weights_dtype(config),
    )
    _check_shapes(parsed)
    return parsed


def _check_supported(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type != "deepseek_v4":
        raise ModelError(f"config.json: model_type {model_type!r} is not supported (supported: 'deepseek_v4')")
    check_quantization(config.get("quantization_config"))
    check_variants(config)


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    names = config.get("layer_types")
    if names is not None:
        try:
            kinds = tuple(LayerKind(name) for name in names)
        except ValueError as error:
            raise ModelError(f"config.json: layer_types: {error}") from error
        key = "layer_types"
    else:
        ratios = config.get("compress_ratios")
        if ratios is None:
            raise ModelError("config.json: neither compress_ratios nor layer_types says what kind each layer is")
        unknown = sorted(set(ratios) - set(_KIND_OF_RATIO))
        if unknown:
            raise ModelError(f"config.json: compress_ratios may hold 0, 4 and 128, got {unknown}")
        kinds = tuple(_KIND_OF_RATIO[ratio] for ratio in ratios)
        key = "compress_ratios"
    if len(kinds) < num_layers:
        raise ModelError(f"config.json: {key} has {len(kinds)} items for {num_layers} layers")
    return kinds[:num_layers]  # what follows belongs to draft layers


def _hash_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    names = config.get("mlp_layer_types")
    if names is None:
        num_hash = int(config.get("num_hash_layers", _DEFAULT_NUM_HASH_LAYERS))
        return tuple(layer < num_hash for layer in range(num_layers))
    unknown = sorted(set(names) - {"hash_moe", "moe"})
    if unknown or len(names) < num_layers:
        raise ModelError(f"config.json: mlp_layer_types must name hash_moe or moe for each of {num_layers} layers")
    return tuple(name == "hash_moe" for name in names[:num_layers])


def _rope_dim(config: Mapping[str, Any], head_dim: int) -> int:
    if "qk_rope_head_dim" in config:
        return positive(config, "qk_rope_head_dim")
    return int(head_dim * number(config, "partial_rotary_factor", 64 / 512))


def _ropes(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """(rope of window-only layers, rope of compressed layers). YaRN's attention factor is never applied in V4."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    main, compress = parameters.get("main"), parameters.get("compress")
    if isinstance(main, dict) and isinstance(compress, dict):
        return (
            RopeConfig(number(main, "rope_theta", 10000.0)),
            RopeConfig(number(compress, "rope_theta", 160000.0), yarn(compress)),
        )
    return (
        RopeConfig(number(config, "rope_theta", 10000.0)),
        RopeConfig(number(config, "compress_rope_theta", 160000.0), yarn(parameters)),
    )


def _check_shapes(config: V4Config) -> None:
    if config.rope_dim % 2 or config.rope_dim > min(config.head_dim, config.index_dim):
        raise ModelError(f"config.json: {config.rope_dim} rotary dims do not fit into the heads")
    if config.num_heads % config.num_output_groups:
        raise ModelError(f"config.json: {config.num_heads} heads do not split into {config.num_output_groups} o_groups")
    if config.experts_per_token > config.num_experts:
        raise ModelError("config.json: num_experts_per_tok is larger than n_routed_experts")
    if config.hidden_size % 8 or config.expert_dim % 8:
        raise ModelError("config.json: hidden_size and moe_intermediate_size must be multiples of 8 (grouped products)")
    if min(config.csa_ratio, config.hca_ratio) < 1:
        raise ModelError("config.json: compress_rates must be positive")
