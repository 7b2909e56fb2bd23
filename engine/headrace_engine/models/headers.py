"""Headers of safetensors files: which tensors a shard holds and where. Weights themselves are not read; no torch here.

The library that reads tensors checks headers too, but says neither which tensor a short file cuts off nor where a
tensor's bytes are.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_engine.models.errors import ModelError
from headrace_engine.models.names import Stored

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}


@dataclass(frozen=True)
class StoredTensor(Stored):
    file: Path
    start: int  # first byte in the file
    end: int  # one past the last

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def has_weights(folder: Path) -> bool:
    return (folder / _INDEX).is_file() or (folder / _SINGLE).is_file()


def shard_files(folder: Path) -> list[Path]:
    """The files with the weights of a checkpoint folder, in order. Raises ModelError naming what is missing."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        if not single.is_file():
            raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} has no readable weight_map: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks files that {_INDEX} names: {', '.join(missing)}")
    return [folder / name for name in names]


def read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the shards by name. Raises ModelError naming file and tensor for what is damaged."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise ModelError(f"tensor {tensor.name} is in both {tensors[tensor.name].file} and {file}")
            tensors[tensor.name] = tensor
    return tensors


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file in the order of their bytes, which must all be there. Raises ModelError."""
    try:
        with file.open("rb") as stream:
            file_bytes = file.stat().st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            if length > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise _damaged(file, f"its {file_bytes:,} bytes do not hold its header")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise _damaged(file, str(error)) from error
    except ValueError as error:
        raise _damaged(file, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no JSON object")
    tensors = [_tensor(file, 8 + length, name, item) for name, item in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: tensor.start)
    end = 8 + length
    for tensor in tensors:
        if tensor.start != end:
            raise _damaged(file, f"tensor {tensor.name} starts at byte {tensor.start:,} instead of {end:,}")
        end = tensor.end
        if end > file_bytes:
            raise _damaged(file, f"tensor {tensor.name} ends at byte {end:,}, but the file at {file_bytes:,}")
    if end != file_bytes:
        raise _damaged(file, f"{file_bytes - end:,} bytes follow the last tensor")
    return tensors


def _tensor(file: Path, data_start: int, name: str, item: Mapping[str, Any]) -> StoredTensor:
    try:
        dtype, shape, (start, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        num_bits = math.prod(shape) * _BITS.get(dtype, 0)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, f"tensor {name} has no readable entry in its header: {error!r}") from error
    if num_bits and num_bits != 8 * (end - start):
        raise _damaged(file, f"tensor {name} has {end - start:,} bytes, but is {dtype} of shape {list(shape)}")
    return StoredTensor(name, shape, dtype, file, data_start + start, data_start + end)


def _damaged(file: Path, what: str) -> ModelError:
    return ModelError(f"{file} is damaged or incomplete: {what}; copy it again")
