"""The tiny checkpoint, loaded once as our model and once as transformers' (the independent implementation)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace_engine import models
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.tiny import write_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-v4")
    write_tiny(path, family="v4", seed=0)
    return path


@pytest.fixture(scope="session")
def model(tiny_path: Path) -> DeepseekV4:
    return models.load(tiny_path)


@pytest.fixture(scope="session")
def reference(tiny_path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()
