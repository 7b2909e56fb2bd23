"""A checkpoint folder's JSON files, and the short description that the rest of the engine needs of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_engine.models.errors import ModelError


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model before its weights are read."""

    architecture: str  # the checkpoint's model_type
    vocab_size: int
    max_position: int  # longest sequence in tokens, prompt and answer together
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    block_multiple: int  # the cache's block size must be a multiple of this many tokens
    num_experts: int
    dtype: str  # "float32" | "bfloat16": what dtype "auto" means
    image_token_id: int | None = None  # a token that stands for an image, which the text model cannot read


def read_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json (empty if absent) of a checkpoint folder. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"model folder {path} does not exist")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: it is not a checkpoint folder")
    generation = path / "generation_config.json"
    return _read_object(path / "config.json"), _read_object(generation) if generation.is_file() else {}


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids; the generation config wins, as in other engines."""
    value = generation_config.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(ids)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value
