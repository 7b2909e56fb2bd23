"""The tiny models of the families that publish a drafter, each loaded once with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from headrace_engine import models
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.drafter import Drafter
from headrace_engine.models.tiny import write_tiny

FAMILIES = ("v4", "v4-0731", "v41")
Pair = tuple[DeepseekV4 | DeepseekV41, Drafter]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint folder; not to be changed."""

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        write_tiny(path, family, 0)
        return path

    return folder


@pytest.fixture(scope="session")
def loaded(folder_of: Callable[[str], Path]) -> Callable[[str], Pair]:
    @cache
    def load(family: str) -> Pair:
        model = models.load(folder_of(family))
        assert isinstance(model, DeepseekV4 | DeepseekV41)
        return model, models.load_drafter(folder_of(family), model)

    return load
