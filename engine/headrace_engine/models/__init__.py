"""Models the engine can serve, by the `model_type` of the checkpoint's config.json.

`describe_config` is cheap (JSON only, no torch) and is what a frontend needs before any rank has loaded weights;
`load` builds one rank's share of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import ModelInfo, read_configs

if TYPE_CHECKING:
    from headrace_engine.models.deepseek_v4.model import DeepseekV4

__all__ = ["ModelError", "ModelInfo", "describe_config", "load"]


def describe_config(path: str | Path) -> ModelInfo:
    """What the checkpoint folder's JSON files say about the model. Raises ModelError."""
    from headrace_engine.models.deepseek_v4.config import describe

    config, generation_config = read_configs(Path(path))
    return describe(config, generation_config)


def load(
    path: str | Path,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    cache_dtype: str = "auto",
    device: str = "cpu",
) -> DeepseekV4:
    """One rank's share of the model in the checkpoint folder `path`. Raises ModelError.

    expert_parallel: rank r of n holds experts [r * E / n, (r + 1) * E / n); otherwise every rank holds all.
    dtype, cache_dtype: "auto" (the checkpoint's own), "float32" or "bfloat16".
    """
    from headrace_engine.models.deepseek_v4.load import load_model

    if not 0 <= rank < num_ranks:
        raise ModelError(f"rank {rank} is not among {num_ranks} ranks")
    return load_model(
        Path(path),
        expert_rank=rank if expert_parallel else 0,
        num_expert_ranks=num_ranks if expert_parallel else 1,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
    )
