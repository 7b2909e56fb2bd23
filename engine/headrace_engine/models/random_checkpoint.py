"""Writes random checkpoints in published form: every tensor matters, and the same bytes each time. No torch here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headrace_engine.models.deepseek_v4.tiny_tokenizer import EOS_ID, VOCAB_SIZE, byte_token_ids
from headrace_engine.models.names import Shape
from headrace_engine.models.shards import Storage, encoded, write_shards

Array = np.ndarray[Any, Any]

_SHARD_BYTES = 256 << 10  # small enough that a tiny model has several shards, as a real one has


@dataclass(frozen=True)
class Published:
    """How a family's published checkpoints differ from plain fp32 ones."""

    config: Mapping[str, Any]  # what they add to config.json, or say otherwise
    storage: Callable[[str], Storage]  # of each tensor, by published name
    fp8_block: tuple[int, int]  # rows, columns that share a scale


def write_random(
    folder: Path,
    raw_config: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    num_experts: int,
    seed: int,
    *,
    published: Published | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """config.json, generation_config.json and weights of these names and shapes. Files of these names go.

    Plain fp32 in one file, or the same numbers in the number formats and shards of `published` ones.
    """
    weights = ((name, random_tensor(name, shape, num_experts, seed)) for name, shape in shapes.items())
    if published is None:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        raw_config = {**raw_config, **published.config}
        tensors = (
            part
            for name, values in weights
            for part in encoded(name, values, published.storage(name), published.fp8_block)
        )
        write_shards(folder, tensors, max_shard_bytes)
    ids = {key: raw_config[key] for key in ("bos_token_id", "eos_token_id") if key in raw_config}
    for name, value in (("config.json", raw_config), ("generation_config.json", ids)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def random_tensor(name: str, shape: Shape, num_experts: int, seed: int) -> Array:
    """One tensor's values. Its own generator, so that no tensor depends on the order of the others."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("tid2eid"):  # distinct experts for each token, as in a trained table
        return generator.random((shape[0], num_experts)).argsort(axis=1)[:, : shape[1]].astype(np.int64)
    normal = generator.standard_normal(shape, dtype=np.float32)
    if name.endswith(("norm.weight", "_scale", "q_weight", "k_weight")):
        return np.float32(1) + np.float32(0.1) * normal
    if name.endswith("gate.bias"):
        return np.float32(0.2) * normal
    if name.endswith((".ape", "attn_sink", "_base")):  # zero in a fresh model: they must matter here
        return np.float32(0.5) * normal
    if name.endswith("confidence_head.proj.weight"):  # of unnormed streams: neither sure nor clueless
        return normal * np.float32(0.1 / shape[-1] ** 0.5)
    if name.endswith("embed.weight"):
        return normal
    if name == "head.weight":
        return normal * np.float32(2 / shape[1] ** 0.5) * _readable_text(shape[0])
    return normal * np.float32(1.5 / shape[-1] ** 0.5)


def _readable_text(vocab_size: int) -> Array:
    """[vocab, 1] scale of the head's rows: mostly ASCII letters, sometimes another byte, now and then the end."""
    scale = np.full((vocab_size, 1), 1.0, dtype=np.float32)
    if vocab_size != VOCAB_SIZE:
        return scale
    scale[:] = 0.1
    scale[EOS_ID] = 0.9
    for value, token in byte_token_ids().items():
        scale[token] = 1.0 if chr(value).isascii() and (chr(value).isalpha() or value == 0x20) else 0.5
    return scale
