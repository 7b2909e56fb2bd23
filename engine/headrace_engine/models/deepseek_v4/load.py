"""Builds a DeepSeek-V4 model from a checkpoint folder: reads this rank's tensors and fuses those that run together."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace_engine.models.builder import DTYPES, Builder, experts_of, resolve_cache_dtype, resolve_dtype
from headrace_engine.models.checkpoint import Checkpoint, computation_digest
from headrace_engine.models.deepseek_v4.attention import Attention, AttentionWeights, CompressorWeights
from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config, parse
from headrace_engine.models.deepseek_v4.formats import rounding
from headrace_engine.models.deepseek_v4.model import DeepseekV4, Layer
from headrace_engine.models.deepseek_v4.names import match_checkpoint
from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import eos_token_ids, read_configs
from headrace_engine.models.moe import load_moe
from headrace_engine.models.progress import LoadProgress
from headrace_engine.models.projections import read_input_projections
from headrace_engine.models.rounding import NO_ROUNDING, FakeQuantization, Rounding


def load_model(
    path: Path,
    *,
    expert_rank: int,
    num_expert_ranks: int,
    dtype: str,
    cache_dtype: str,
    fake_quantization: FakeQuantization,
    device: str,
    progress: LoadProgress | None = None,
    bounded_replay: bool = False,
) -> DeepseekV4:
    """The model with experts [expert_rank * E / n, (expert_rank + 1) * E / n) of n ranks. Raises ModelError.

    dtype: "auto" (the checkpoint's own), "float32", "bfloat16"; cache_dtype: "auto" (as dtype), these, "fp8", "fp4".
    """
    if bounded_replay:
        raise ModelError("bounded replay is an approximation that DeepSeek-V4 was not trained for, only V4.1")
    raw_config, generation_config = read_configs(path)
    config = parse(raw_config)
    dtype = resolve_dtype(dtype, config.dtype, "dtype")
    cache_dtype = resolve_cache_dtype(cache_dtype, dtype)
    rounds = rounding(config, fake_quantization, cache_dtype)
    experts = experts_of(expert_rank, num_expert_ranks, config.num_experts)
    with Checkpoint(path) as checkpoint:
        sources = match_checkpoint(config, checkpoint.stored())
        builder = Builder(checkpoint, sources, DTYPES[dtype], device, experts, progress)
        layers = builder.each_layer(
            lambda index: load_layer(builder, config, index, f"layers.{index}.", rounds), config.num_layers
        )
        return DeepseekV4(
            config,
            embedding=builder.tensor("embed.weight"),
            layers=layers,
            head_hc=builder.hyper_connection("hc_head"),
            norm=builder.wide("norm.weight"),
            head=builder.linear("head.weight"),
            cache_dtype=cache_dtype,
            eos_token_ids=eos_token_ids(raw_config, generation_config),
            digest=computation_digest(config, checkpoint.files, dtype, fake_quantization),
        )


def load_layer(builder: Builder, config: V4Config, index: int, prefix: str, rounds: Rounding = NO_ROUNDING) -> Layer:
    """Layer `index` of the config, whose tensors are under a published prefix."""
    table = _expert_table(builder, config, f"{prefix}ffn.gate.tid2eid") if config.hash_layers[index] else None
    return Layer(
        attention=_attention(builder, config, rounds, index, f"{prefix}attn."),
        moe=load_moe(builder, config, f"{prefix}ffn.", table, rounds),
        attention_hc=builder.hyper_connection(f"{prefix}hc_attn"),
        moe_hc=builder.hyper_connection(f"{prefix}hc_ffn"),
        attention_norm=builder.wide(f"{prefix}attn_norm.weight"),
        moe_norm=builder.wide(f"{prefix}ffn_norm.weight"),
    )


def _attention(builder: Builder, config: V4Config, rounds: Rounding, index: int, prefix: str) -> Attention:
    kind = config.layer_kinds[index]
    compressors = []  # outputs that stay together
    if kind is not LayerKind.WINDOW:
        compressors.append(["compressor.wkv", "compressor.wgate"])
    if kind is LayerKind.CSA:
        compressors += [["indexer.compressor.wkv", "indexer.compressor.wgate"], ["indexer.weights_proj"]]
    w_in = read_input_projections(builder, prefix, [["wq_a"], ["wkv"]], compressors, rounds)
    weights = AttentionWeights(
        w_in=w_in,
        w_q=builder.linear(f"{prefix}wq_b.weight"),
        w_index_q=builder.linear(f"{prefix}indexer.wq_b.weight") if kind is LayerKind.CSA else None,
        w_out_a=builder.grouped_linear(f"{prefix}wo_a.weight", config.num_output_groups),
        w_out_b=builder.linear(f"{prefix}wo_b.weight"),
        q_norm=builder.wide(f"{prefix}q_norm.weight"),
        kv_norm=builder.wide(f"{prefix}kv_norm.weight"),
        sinks=builder.wide(f"{prefix}attn_sink"),
    )
    compressor = index_compressor = None
    if kind is not LayerKind.WINDOW:
        compressor = _compressor(builder, f"{prefix}compressor.")
    if kind is LayerKind.CSA:
        index_compressor = _compressor(builder, f"{prefix}indexer.compressor.")
    return Attention(config, index, weights, compressor, index_compressor, rounds)


def _compressor(builder: Builder, prefix: str) -> CompressorWeights:
    return CompressorWeights(position_bias=builder.wide(f"{prefix}ape"), norm=builder.wide(f"{prefix}norm.weight"))


def _expert_table(builder: Builder, config: V4Config, name: str) -> torch.Tensor:
    table = builder.tensor(name, torch.int64)
    if int(table.min()) < 0 or int(table.max()) >= config.num_experts:
        raise ModelError(f"tensor {name} names experts outside 0..{config.num_experts - 1}")
    return table
