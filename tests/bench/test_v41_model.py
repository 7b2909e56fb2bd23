"""DeepSeek-V4.1 of `make bench-steps`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench import v41_model
from tests.bench.peer import install

from headrace_engine import models
from headrace_engine.models.deepseek_v41.config import LayerMode, parse
from headrace_engine.models.deepseek_v41.draft import drafter_shapes
from headrace_engine.models.deepseek_v41.tiny import TINY_CONFIG


def test_every_layer_mode_is_in_it() -> None:
    config = parse(v41_model.make_config())
    assert {config.mode(layer) for layer in range(config.num_layers)} == set(LayerMode)
    assert config.dtype == "bfloat16"
    assert drafter_shapes(v41_model.make_config())


def test_a_folder_of_another_configuration_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "cache_directory", lambda: tmp_path)
    for positions in (8192, 4096):
        monkeypatch.setattr(v41_model, "make_config", lambda size=positions: TINY_CONFIG | _positions(size))
        assert models.describe_config(v41_model.v41_directory()).max_position == positions


def _positions(count: int) -> dict[str, object]:
    return {"text_config": TINY_CONFIG["text_config"] | {"max_position_embeddings": count}}
