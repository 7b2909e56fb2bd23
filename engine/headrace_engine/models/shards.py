"""Writing safetensors checkpoints in any number format, in shards with an index as published. No torch here."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file

from headrace_engine.models.quantize import FP8_ROW_BLOCK, bfloat16_bits, quantize_fp4, quantize_fp8

Array = np.ndarray[Any, Any]

_SPEC_NAMES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "I64": "int64",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True)
class Tensor:
    """Contiguous data of any dtype of the right size, and what a reader is to take it for."""

    data: Array
    dtype: str  # safetensors' name: "F32", "BF16", "F8_E4M3", ...


class Storage(enum.Enum):
    """How a checkpoint stores a tensor."""

    F32 = enum.auto()
    BF16 = enum.auto()
    I64 = enum.auto()
    FP8 = enum.auto()  # e4m3 with ue8m0 scales of blocks
    FP8_ROWS = enum.auto()  # e4m3 with ue8m0 scales of 32 in a row
    FP4 = enum.auto()  # two e2m1 a byte with ue8m0 scales of 32 in a row


def encoded(name: str, values: Array, storage: Storage, fp8_block: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """The tensor or two that hold `values` under its published name; a quantized NAME.weight comes with NAME.scale."""
    scale_name = name.removesuffix(".weight") + ".scale"
    match storage:
        case Storage.F32:
            yield name, Tensor(np.ascontiguousarray(values, dtype=np.float32), "F32")
        case Storage.BF16:
            yield name, Tensor(bfloat16_bits(values), "BF16")
        case Storage.I64:
            yield name, Tensor(np.ascontiguousarray(values, dtype=np.int64), "I64")
        case Storage.FP8 | Storage.FP8_ROWS:
            codes, scales = quantize_fp8(values, fp8_block if storage is Storage.FP8 else FP8_ROW_BLOCK)
            yield name, Tensor(codes, "F8_E4M3")
            yield scale_name, Tensor(scales, "F8_E8M0")
        case Storage.FP4:
            codes, scales = quantize_fp4(values)
            yield name, Tensor(codes, "I8")
            yield scale_name, Tensor(scales, "F8_E8M0")


def write_file(file: Path, tensors: dict[str, Tensor]) -> None:
    specs = {
        name: TensorSpec(
            dtype=_SPEC_NAMES[tensor.dtype],
            shape=list(tensor.data.shape),
            data_ptr=tensor.data.ctypes.data,
            data_len=tensor.data.nbytes,
        )
        for name, tensor in tensors.items()
    }
    serialize_file(specs, file, metadata={"format": "pt"})


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """model-00001-of-0000N.safetensors and so on, and the index over them.

    Tensors keep their order. One shard at a time is in memory; only a single larger tensor makes a shard exceed its
    limit.
    """
    shards: list[list[str]] = []
    total_bytes = 0
    for shard in _groups(tensors, max_shard_bytes):
        write_file(folder / f"{len(shards)}.part", shard)
        shards.append(list(shard))
        total_bytes += sum(tensor.data.nbytes for tensor in shard.values())
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.part").replace(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _groups(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.data.nbytes > max_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.data.nbytes
    if shard:
        yield shard
