"""Models the engine can serve, by the `model_type` of the checkpoint's config.json.

`describe_config` is cheap (JSON only, no torch) and is what a frontend needs before any rank has loaded weights;
`load` builds one rank's share of the model, `load_drafter` that of the drafter that came with it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import ModelInfo, read_configs
from headrace_engine.models.rounding import FakeQuantization

if TYPE_CHECKING:
    from headrace_engine.models.drafter import Drafter
    from headrace_engine.models.outline import Outline
    from headrace_engine.models.progress import LoadProgress
    from headrace_engine.models.protocol import Model

__all__ = ["ModelError", "ModelInfo", "describe_config", "load", "load_drafter", "outline_of", "stored_bytes_of"]

# Each is a package here, with modules of the same functions: `config`, `names`, `outline`, `load`, and for its drafter
# `draft`, `load_drafter`.
_MODEL_TYPES = ("deepseek_v4", "deepseek_v41")


def describe_config(path: str | Path) -> ModelInfo:
    """What the checkpoint folder's JSON files say about the model. Raises ModelError."""
    config, generation_config = read_configs(Path(path))
    info: ModelInfo = _module(config, "config").describe(config, generation_config)
    return info


def outline_of(path: str | Path, dtype: str = "auto", cache_dtype: str = "auto") -> Outline:
    """Sizes of the model in a folder with a config.json; weights need not be there. Raises ModelError."""
    config, generation_config = read_configs(Path(path))
    if dtype == "auto":
        dtype = describe_config(path).dtype
    if cache_dtype == "auto":
        cache_dtype = dtype
    outline: Outline = _module(config, "outline").outline(config, generation_config, dtype, cache_dtype)
    return outline


def stored_bytes_of(path: str | Path) -> dict[str, int] | None:
    """Published name -> bytes in the checkpoint of every tensor, the drafter's too if it is there.

    None: there are no weights in the folder.

    Raises ModelError if the weights are damaged or do not fit config.json.
    """
    from headrace_engine.models.headers import has_weights, read_headers, shard_files
    from headrace_engine.models.outline import stored_bytes

    if not has_weights(Path(path)):
        return None
    config, _ = read_configs(Path(path))
    stored = read_headers(shard_files(Path(path)))
    parsed = _module(config, "config").parse(config)
    sources = _module(config, "names").match_checkpoint(parsed, stored.values())
    if any(name.startswith("mtp.") for name in stored):  # those who train on have none, whatever config.json says
        sources |= _module(config, "draft").match_checkpoint_drafter(config, stored.values())
    return stored_bytes(sources, stored)


def load(
    path: str | Path,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    cache_dtype: str = "auto",
    fake_quantization: str = "none",
    device: str = "cpu",
    progress: LoadProgress | None = None,
    bounded_replay: bool = False,
) -> Model:
    """One rank's share of the model in the checkpoint folder `path`. Raises ModelError.

    expert_parallel: rank r of n holds experts [r * E / n, (r + 1) * E / n); otherwise every rank holds all.
    dtype: "auto" (the checkpoint's own), "float32" or "bfloat16"; cache_dtype: "auto" (as dtype), these, or "fp8" or
    "fp4" for packed records. fake_quantization: which roundings of its training the model does
    (rounding.FakeQuantization).
    bounded_replay: leave rows out as DeepSeek-V4.1 is trained for (deepseek_v41.replay); changes logits slightly.
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
        fake_quantization=FakeQuantization(fake_quantization),
        device=device,
        progress=progress,
        bounded_replay=bounded_replay,
    )
    return model


def load_drafter(
    path: str | Path,
    model: Model,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    expert_parallel: bool = False,
    num_drafts: int | None = None,
    cache_dtype: str = "auto",
    progress: LoadProgress | None = None,
) -> Drafter:
    """One rank's share of the drafter in the folder that `model` was loaded from. Raises ModelError if there is none.

    num_drafts: tokens to draft at once, where the drafter leaves a choice; None: as published. cache_dtype: of its own
    windows, "auto" (as the model computes), "float32" or "bfloat16".
    """
    config, _ = read_configs(Path(path))
    drafter: Drafter = _module(config, "load_drafter").load_drafter(
        Path(path),
        model,
        expert_rank=rank if expert_parallel else 0,
        num_expert_ranks=num_ranks if expert_parallel else 1,
        num_drafts=num_drafts,
        cache_dtype=cache_dtype,
        progress=progress,
    )
    return drafter


def _module(config: dict[str, Any], name: str) -> Any:
    """A module of the family that config.json names; imported only now, since loading needs torch."""
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        supported = ", ".join(repr(known) for known in _MODEL_TYPES)
        raise ModelError(f"config.json: model_type {model_type!r} is not supported (supported: {supported})")
    return importlib.import_module(f"headrace_engine.models.{model_type}.{name}")
