"""The benchmark of loading: its checkpoint is a real one, and its counts are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench import loading

from headrace_engine import models
from headrace_engine.models.deepseek_v4.tiny import TINY_CONFIG
from headrace_engine.models.headers import read_headers, shard_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    loading.write_checkpoint(tmp_path, TINY_CONFIG)
    return tmp_path


def test_the_checkpoint_is_of_the_published_formats_and_loads(folder: Path) -> None:
    dtypes = {tensor.dtype for tensor in read_headers(shard_files(folder)).values()}
    assert dtypes == {"I8", "F8_E4M3", "F8_E8M0", "BF16", "F32", "I64"}
    assert bool(models.load(folder).layers[5].moe.w13.plain().isfinite().all())


def test_a_size_in_layers() -> None:
    assert loading.num_layers(2e9) == 9
    assert len(loading.make_config(9)["layer_types"]) == 9


@pytest.mark.slow
def test_two_processes_read_each_experts_bytes_once(folder: Path) -> None:
    stored = read_headers(shard_files(folder)).values()
    shared_bytes = sum(tensor.num_bytes for tensor in stored if ".experts." not in tensor.name)
    loaded = loading.load_ranks(folder, forgotten=[])
    assert loaded.tensor_bytes == sum(tensor.num_bytes for tensor in stored) + shared_bytes
    assert loaded.cpu_seconds > 0
    assert loaded.seconds > 0
