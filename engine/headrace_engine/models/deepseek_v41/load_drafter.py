"""Builds a DeepSeek-V4.1 checkpoint's drafter, beside the main model that is loaded already."""

from __future__ import annotations

from pathlib import Path

from headrace_engine.models.builder import NAMES, Builder, experts_of, resolve_dtype
from headrace_engine.models.checkpoint import Checkpoint
from headrace_engine.models.deepseek_v41.draft import MARKOV, layer_config, match_checkpoint_drafter, parse_drafter
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.drafter import Drafter, check_num_drafts
from headrace_engine.models.dspark.load import load_dspark
from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import read_configs
from headrace_engine.models.progress import LoadProgress
from headrace_engine.models.residual import SinglePassResidual


def load_drafter(
    path: Path,
    model: DeepseekV41,
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
    check_num_drafts(num_drafts, drafter.block_size)
    config = layer_config(raw_config, drafter)
    with Checkpoint(path) as checkpoint:
        return load_dspark(
            Builder(
                checkpoint,
                match_checkpoint_drafter(raw_config, checkpoint.stored()),
                model.embedding.dtype,
                str(model.embedding.device),
                experts_of(expert_rank, num_expert_ranks, config.num_experts),
                progress,
            ),
            drafter,
            config,
            MARKOV,
            lambda streams: SinglePassResidual(config, streams),
            head_norm_eps=None,
            embedding=model.embedding,
            head=model.head,
            cache_dtype=resolve_dtype(cache_dtype, NAMES[model.embedding.dtype], "cache dtype"),
        )
