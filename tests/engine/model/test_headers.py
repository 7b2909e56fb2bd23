"""Headers of safetensors files: where each tensor is, and what is said of a damaged file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace_engine.models import ModelError
from headrace_engine.models.headers import read_header, read_headers

TWO = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F8_E4M3", "shape": [5], "data_offsets": [24, 29]},
}


def file_of(folder: Path, header: Any, data: bytes = b"\1" * 29) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "shard.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def test_where_each_tensor_is(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    tensors = {"one": torch.arange(6.0).view(2, 3), "two": torch.arange(4, dtype=torch.int8)}
    save_file(tensors, file, metadata={"format": "pt"})
    content = file.read_bytes()
    for stored in read_header(file):
        expected = tensors[stored.name]
        assert (stored.shape, stored.num_bytes) == (tuple(expected.shape), expected.nbytes)
        assert content[stored.start : stored.end] == expected.numpy().tobytes()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (TWO, b"\1" * 28, "tensor b ends at byte"),
        (TWO, b"\1" * 10, "tensor a ends at byte"),
        (TWO, b"\1" * 30, "1 bytes follow the last tensor"),
        ({**TWO, "b": {**TWO["b"], "data_offsets": [20, 25]}}, b"\1" * 25, "tensor b starts at byte"),
        ({**TWO, "b": {**TWO["b"], "shape": [6]}}, b"\1" * 29, r"tensor b has 5 bytes, but is F8_E4M3 of shape \[6\]"),
        ({"a": {"dtype": "F32"}}, b"", "tensor a has no readable entry"),
        ({"a": None}, b"", "tensor a has no readable entry"),
        ([], b"", "no JSON object"),
        (b"{", b"", "its header is no JSON"),
    ],
)
def test_a_damaged_file_is_named_with_the_tensor(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    file = file_of(tmp_path, header, data)
    with pytest.raises(ModelError, match=rf"shard\.safetensors is damaged or incomplete: .*{message}"):
        read_header(file)


@pytest.mark.parametrize("keep", [0, 5, 8, 40])
def test_a_file_without_a_whole_header_is_named(tmp_path: Path, keep: int) -> None:
    file = file_of(tmp_path, TWO)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"shard\.safetensors is damaged or incomplete: .* do not hold its header"):
        read_header(file)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [file_of(tmp_path, TWO), file_of(tmp_path / "other", TWO)]
    with pytest.raises(ModelError, match="tensor a is in both"):
        read_headers(files)
