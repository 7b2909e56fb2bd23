"""Builds DSpark from a checkpoint's `mtp.*` tensors, beside a main model that is loaded already."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace_engine import kernels
from headrace_engine.models.builder import Builder
from headrace_engine.models.dspark.attention import BlockAttention
from headrace_engine.models.dspark.config import DsparkConfig, StageConfig
from headrace_engine.models.dspark.drafter import Dspark, Stage
from headrace_engine.models.dspark.heads import DraftHeads
from headrace_engine.models.dspark.names import MarkovNames
from headrace_engine.models.moe import load_moe
from headrace_engine.models.residual import Residual


def load_dspark(
    builder: Builder,
    dspark: DsparkConfig,
    config: StageConfig,
    markov: MarkovNames,
    residual_of: Callable[[torch.Tensor], Residual],
    *,
    head_norm_eps: float | None,
    embedding: torch.Tensor,
    head: kernels.Weight,
    cache_dtype: str,
) -> Dspark:
    """config: of the stages, with the drafter's own experts. embedding, head: the main model's."""
    last = f"mtp.{dspark.num_stages - 1}."
    return Dspark(
        dspark,
        config,
        embedding=embedding,
        w_context=builder.linear("mtp.0.main_proj.weight"),
        context_norm=builder.wide("mtp.0.main_norm.weight"),
        stages=builder.each_layer(lambda stage: _stage(builder, config, stage, head_norm_eps), dspark.num_stages),
        residual_of=residual_of,
        heads=DraftHeads(
            norm=builder.wide(f"{last}norm.weight"),
            head=head,
            markov_embedding=builder.tensor(last + markov.embedding),
            markov_head=builder.linear(last + markov.head),
            confidence=builder.wide(f"{last}confidence_head.proj.weight")[0],
        ),
        cache_dtype=cache_dtype,
    )


def _stage(builder: Builder, config: StageConfig, stage: int, head_norm_eps: float | None) -> Stage:
    prefix, attn = f"mtp.{stage}.", f"mtp.{stage}.attn."
    return Stage(
        attention=BlockAttention(
            w_q_a=builder.linear(f"{attn}wq_a.weight"),
            w_kv=builder.linear(f"{attn}wkv.weight"),
            w_q=builder.linear(f"{attn}wq_b.weight"),
            w_out_a=builder.grouped_linear(f"{attn}wo_a.weight", config.num_output_groups),
            w_out_b=builder.linear(f"{attn}wo_b.weight"),
            q_norm=builder.wide(f"{attn}q_norm.weight"),
            kv_norm=builder.wide(f"{attn}kv_norm.weight"),
            sinks=builder.wide(f"{attn}attn_sink"),
            head_norm_eps=head_norm_eps,
        ),
        moe=load_moe(builder, config, f"{prefix}ffn."),
        attention_hc=builder.hyper_connection(f"{prefix}hc_attn"),
        moe_hc=builder.hyper_connection(f"{prefix}hc_ffn"),
        attention_norm=builder.wide(f"{prefix}attn_norm.weight"),
        moe_norm=builder.wide(f"{prefix}ffn_norm.weight"),
    )
