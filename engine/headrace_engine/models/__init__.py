"""Models the engine can serve, by the `model_type` of the checkpoint's config.json.

`describe_config` is cheap (JSON only, no torch) and is what a frontend needs before any rank has loaded weights;
`load` builds one rank's share of the model.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import ModelInfo, read_configs

if TYPE_CHECKING:
    from headrace_engine.models.outline import Outline
    from headrace_engine.models.progress import LoadProgress
    from headrace_engine.models.protocol import Model

__all__ = ["ModelError", "ModelInfo", "describe_config", "load", "outline_of", "stored_bytes_of"]

# Each is a package here, with modules `config`, `names`, `outline` and `load` of the same functions.
_MODEL_TYPES = ("deepseek_v4", "deepseek_v41")


def describe_config(path: str | Path) -> ModelInfo:
    """What the checkpoint folder's JSON files say about the model. Raises ModelError."""
    config, generation_config = read_configs(Path(path))
    info: ModelInfo = _module(config, "config").describe(config, generation_config)
    return info


def outline_of(path: str | Path, cache_dtype: str = "auto") -> Outline:
    """Sizes of the model in a folder with a config.json; weights need not be there. Raises ModelError."""
    config, generation_config = read_configs(Path(path))
    if cache_dtype == "auto":
        cache_dtype = describe_config(path).dtype
    outline: Outline = _module(config, "outline").outline(config, generation_config, cache_dtype)
    return outline


def stored_bytes_of(path: str | Path) -> dict[str, int] | None:
    """Published name -> bytes in the checkpoint of every tensor; None: there are no weights in the folder.

    Raises ModelError if the weights are damaged or do not fit config.json.
    """
    from headrace_engine.models.headers import has_weights, read_headers, shard_files
    from headrace_engine.models.outline import stored_bytes

    if not has_weights(Path(path)):
        return None
    config, _ = read_configs(Path(path))
    stored = read_headers(shard_files(Path(path)))
    parsed = _module(config, "config").parse(config)
    return stored_bytes(_module(config, "names").match_checkpoint(parsed, stored.values()), stored)


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
) -> Model:
    """One rank's share of the model in the checkpoint folder `path`. Raises ModelError.

    expert_parallel: rank r of n holds experts [r * E / n, (r + 1) * E / n); otherwise every rank holds all.
    dtype, cache_dtype: "auto" (the checkpoint's own), "float32" or "bfloat16".
    """
    if not 0 <= rank < num_ranks:
        raise ModelError(f"rank {rank} is not among {num_ranks} ranks")
    config, _ = read_configs(Path(path))
    model: Model = _module(config, "load").load_model(
        Path(path),
        expert_rank=rank if expert_parallel else 0,
        num_expert_ranks=num_ranks if expert_parallel else 1,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        progress=progress,
    )
    return model


def _module(config: dict[str, Any], name: str) -> Any:
    """A module of the family that config.json names; imported only now, since loading needs torch."""
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        supported = ", ".join(repr(known) for known in _MODEL_TYPES)
        raise ModelError(f"config.json: model_type {model_type!r} is not supported (supported: {supported})")
    return importlib.import_module(f"headrace_engine.models.{model_type}.{name}")
