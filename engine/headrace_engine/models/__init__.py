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
    from headrace_engine.models.outline import Outline
    from headrace_engine.models.progress import LoadProgress

__all__ = ["ModelError", "ModelInfo", "describe_config", "load", "outline_of", "stored_bytes_of"]


def describe_config(path: str | Path) -> ModelInfo:
    """What the checkpoint folder's JSON files say about the model. Raises ModelError."""
    from headrace_engine.models.deepseek_v4.config import describe

    config, generation_config = read_configs(Path(path))
    return describe(config, generation_config)


def outline_of(path: str | Path, cache_dtype: str = "auto") -> Outline:
    """Sizes of the model in a folder with a config.json; weights need not be there. Raises ModelError."""
    from headrace_engine.models.deepseek_v4.outline import outline as outline_v4

    config, generation_config = read_configs(Path(path))
    own = describe_config(path).dtype
    return outline_v4(config, generation_config, own if cache_dtype == "auto" else cache_dtype)


def stored_bytes_of(path: str | Path) -> dict[str, int] | None:
    """Published name -> bytes in the checkpoint of every tensor; None: there are no weights in the folder.

    Raises ModelError if the weights are damaged or do not fit config.json.
    """
    from headrace_engine.models.deepseek_v4.config import parse
    from headrace_engine.models.deepseek_v4.names import match_checkpoint
    from headrace_engine.models.headers import has_weights, read_headers, shard_files
    from headrace_engine.models.outline import stored_bytes

    if not has_weights(Path(path)):
        return None
    config, _ = read_configs(Path(path))
    stored = read_headers(shard_files(Path(path)))
    return stored_bytes(match_checkpoint(parse(config), stored.values()), stored)


def load(
    path: str | Path,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    cache_dtype: str = "auto",
    device: str = "cpu",
    progress: LoadProgress | None = None,
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
        progress=progress,
    )
