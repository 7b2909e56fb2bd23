"""Builds a DeepSeek-V4.1 model from a checkpoint folder: this rank's tensors, and engram tables mapped in place."""

from __future__ import annotations

from pathlib import Path

from headrace_engine.models.builder import DTYPES, Builder, experts_of, resolve_cache_dtype, resolve_dtype
from headrace_engine.models.checkpoint import Checkpoint, computation_digest
from headrace_engine.models.deepseek_v41.attention import Attention, AttentionWeights, CompressorWeights
from headrace_engine.models.deepseek_v41.config import LayerMode, V41Config, parse
from headrace_engine.models.deepseek_v41.engram import Engram, EngramLookup
from headrace_engine.models.deepseek_v41.formats import rounding
from headrace_engine.models.deepseek_v41.model import DeepseekV41, Layer
from headrace_engine.models.deepseek_v41.names import match_checkpoint
from headrace_engine.models.deepseek_v41.ngram_hash import NgramHash
from headrace_engine.models.deepseek_v41.token_map import read_token_map
from headrace_engine.models.info import eos_token_ids, read_configs
from headrace_engine.models.moe import load_moe
from headrace_engine.models.progress import LoadProgress
from headrace_engine.models.projections import read_input_projections
from headrace_engine.models.rounding import FakeQuantization, Rounding


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
) -> DeepseekV41:
    """The model with experts [expert_rank * E / n, (expert_rank + 1) * E / n) of n ranks. Raises ModelError.

    dtype: "auto" (the checkpoint's own), "float32", "bfloat16"; cache_dtype: "auto" (as dtype), these, "fp8", "fp4".
    """
    raw_config, generation_config = read_configs(path)
    config = parse(raw_config)
    dtype = resolve_dtype(dtype, config.dtype, "dtype")
    cache_dtype = resolve_cache_dtype(cache_dtype, dtype)
    rounds = rounding(config, fake_quantization, cache_dtype)
    experts = experts_of(expert_rank, num_expert_ranks, config.num_experts)
    with Checkpoint(path) as checkpoint:
        sources = match_checkpoint(config, checkpoint.stored())
        tables = [] if config.engram is None else [_table_name(layer) for layer in config.engram.layers]
        builder = Builder(checkpoint, sources, DTYPES[dtype], device, experts, progress, mapped=tables)
        return DeepseekV41(
            config,
            embedding=builder.tensor("embed.weight"),
            layers=builder.each_layer(lambda index: _layer(builder, config, rounds, index), config.num_layers),
            engrams=_engrams(builder, config, path),
            norm=builder.wide("norm.weight"),
            head=builder.linear("head.weight"),
            cache_dtype=cache_dtype,
            eos_token_ids=eos_token_ids({**raw_config["text_config"], **raw_config}, generation_config),
            digest=computation_digest(
                (config, "replay") if bounded_replay else config, checkpoint.files, dtype, fake_quantization
            ),
            bounded_replay=bounded_replay,
        )


def _engrams(builder: Builder, config: V41Config, path: Path) -> EngramLookup | None:
    engram = config.engram
    if engram is None:
        return None
    token_map = read_token_map(path, config.vocab_size, engram.pad_token_id, engram.compressed_vocab_size)
    tables = [builder.rows(_table_name(layer)) for layer in engram.layers]
    return EngramLookup(NgramHash(engram, token_map), tables)


def _table_name(layer: int) -> str:
    return f"layers.{layer}.engram.embed.weight"


def _layer(builder: Builder, config: V41Config, rounds: Rounding, index: int) -> Layer:
    prefix = f"layers.{index}."
    has_engram = config.engram is not None and index in config.engram.layers
    return Layer(
        attention=_attention(builder, config, rounds, index, f"{prefix}attn."),
        moe=load_moe(builder, config, f"{prefix}ffn.", rounding=rounds),
        attention_hc=builder.hyper_connection(f"{prefix}hc_attn"),
        moe_hc=builder.hyper_connection(f"{prefix}hc_ffn"),
        attention_norm=builder.wide(f"{prefix}attn_norm.weight"),
        moe_norm=builder.wide(f"{prefix}ffn_norm.weight"),
        engram=_engram(builder, config, rounds, f"{prefix}engram.") if has_engram else None,
    )


def _attention(builder: Builder, config: V41Config, rounds: Rounding, index: int, prefix: str) -> Attention:
    mode = config.mode(index)
    is_index_source = mode in (LayerMode.FULL, LayerMode.REINDEX)
    of_source = []  # outputs that stay together
    if is_index_source:
        of_source.append(["indexer.weights_proj"])
    if mode is LayerMode.FULL:
        of_source.append(["compressor.wkv", "compressor.wgate"] if config.ratios[index] > 1 else ["compressor.wkv"])
    w_in = read_input_projections(builder, prefix, [["wq_a"], ["wkv"]], of_source, rounds)
    weights = AttentionWeights(
        w_in=w_in,
        w_q=builder.linear(f"{prefix}wq_b.weight"),
        w_out_a=builder.grouped_linear(f"{prefix}wo_a.weight", config.num_output_groups),
        w_out_b=builder.linear(f"{prefix}wo_b.weight"),
        q_norm=builder.wide(f"{prefix}q_norm.weight"),
        kv_norm=builder.wide(f"{prefix}kv_norm.weight"),
        sinks=builder.wide(f"{prefix}attn_sink"),
        w_index_q=builder.linear(f"{prefix}indexer.wq_b.weight") if is_index_source else None,
    )
    compressor = None
    if mode is LayerMode.FULL:
        compressor = CompressorWeights(
            norm=builder.wide(f"{prefix}compressor.norm.weight"),
            w_key=builder.linear(f"{prefix}indexer.wk.weight"),
            key_norm=builder.wide(f"{prefix}indexer.k_norm.weight"),
        )
    return Attention(config, index, weights, compressor, rounds)


def _engram(builder: Builder, config: V41Config, rounds: Rounding, prefix: str) -> Engram:
    gain = builder.wide(f"{prefix}q_weight") * builder.wide(f"{prefix}k_weight")
    return Engram(builder.linear(f"{prefix}wkv.weight"), gain, config.norm_eps, rounds)
