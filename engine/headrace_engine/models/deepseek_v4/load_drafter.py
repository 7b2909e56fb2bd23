"""Builds a DeepSeek-V4 checkpoint's drafter, beside the main model that is loaded already."""

from __future__ import annotations

from pathlib import Path

from headrace_engine.models.builder import NAMES, Builder, experts_of, resolve_dtype
from headrace_engine.models.checkpoint import Checkpoint
from headrace_engine.models.deepseek_v4.config import V4Config
from headrace_engine.models.deepseek_v4.draft import (
    MARKOV,
    cache_groups,
    layer_config,
    match_checkpoint_drafter,
    parse_drafter,
)
from headrace_engine.models.deepseek_v4.load import load_layer
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.deepseek_v4.mtp import Mtp, MtpWeights
from headrace_engine.models.drafter import Drafter, check_num_drafts
from headrace_engine.models.dspark.config import DsparkConfig
from headrace_engine.models.dspark.drafter import Dspark
from headrace_engine.models.dspark.load import load_dspark
from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import read_configs
from headrace_engine.models.progress import LoadProgress
from headrace_engine.models.residual import DirectResidual


def load_drafter(
    path: Path,
    model: DeepseekV4,
    *,
    expert_rank: int,
    num_expert_ranks: int,
    num_drafts: int | None,
    cache_dtype: str,
    progress: LoadProgress | None = None,
) -> Drafter:
    """The drafter of the checkpoint that `model` is of, in its dtype and on its device. Raises ModelError."""
    raw_config, _ = read_configs(path)
    drafter = parse_drafter(raw_config)
    if drafter is None:
        raise ModelError(f"{path} has no drafter (config.json: num_nextn_predict_layers, dspark_block_size)")
    config = layer_config(model.config, drafter)
    cache_dtype = resolve_dtype(cache_dtype, NAMES[model.embedding.dtype], "cache dtype")
    experts = experts_of(expert_rank, num_expert_ranks, config.num_experts)
    with Checkpoint(path) as checkpoint:
        sources = match_checkpoint_drafter(raw_config, checkpoint.stored())
        embedding = model.embedding
        builder = Builder(checkpoint, sources, embedding.dtype, str(embedding.device), experts, progress)
        if isinstance(drafter, DsparkConfig):
            check_num_drafts(num_drafts, drafter.block_size)
            return _dspark(builder, model, drafter, config, cache_dtype)
        num_drafts = 1 if num_drafts is None else num_drafts
        return Mtp(
            config,
            _mtp_weights(builder, model, config),
            num_main_layers=model.config.num_layers,
            num_drafts=num_drafts,
            cache_groups=cache_groups(drafter, config, cache_dtype, num_drafts),
        )


def _dspark(builder: Builder, model: DeepseekV4, drafter: DsparkConfig, config: V4Config, cache_dtype: str) -> Dspark:
    residual = DirectResidual(config, builder.hyper_connection(f"mtp.{drafter.num_stages - 1}.hc_head"))
    return load_dspark(
        builder,
        drafter,
        config,
        MARKOV,
        lambda _: residual,
        head_norm_eps=config.norm_eps,
        embedding=model.embedding,
        head=model.head,
        cache_dtype=cache_dtype,
    )


def _mtp_weights(builder: Builder, model: DeepseekV4, config: V4Config) -> MtpWeights:
    return MtpWeights(
        embedding=model.embedding,
        embedding_norm=builder.wide("mtp.0.enorm.weight"),
        w_embedding=builder.linear("mtp.0.e_proj.weight"),
        streams_norm=builder.wide("mtp.0.hnorm.weight"),
        w_streams=builder.linear("mtp.0.h_proj.weight"),
        layer=load_layer(builder, config, 0, "mtp.0."),
        head_hc=builder.hyper_connection("mtp.0.hc_head"),
        norm=builder.wide("mtp.0.norm.weight"),
        head=model.head,
    )
