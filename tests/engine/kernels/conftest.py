"""Every kernel test runs this machine's best target with one thread and with two, and its other code paths with one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace_engine.kernels import build, native

BEST = build.native_target()
WORSE = list(build.TARGETS)[list(build.TARGETS).index(BEST) + 1 :]  # this CPU runs them too
RUNS = [(BEST, 1), (BEST, 2), *((name, 1) for name in ("avx512", "generic") if name in WORSE)]


@pytest.fixture(params=RUNS, ids=[f"{target}-{threads}" for target, threads in RUNS])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the public functions run one target's library with so many threads."""
    target, num_threads = request.param
    try:
        loaded = native.load(target)
    except build.BuildError as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise
    monkeypatch.setattr(native, "library", lambda: loaded)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value
