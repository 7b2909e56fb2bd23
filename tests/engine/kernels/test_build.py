"""Where the compiled library comes from."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace_engine import kernels as ops
from headrace_engine.kernels import build, native


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "package" / "build.py"))
    return tmp_path


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process-wide choice is made anew in the test, and forgotten after it."""
    monkeypatch.setattr(native, "library", native.functools.cache(native.library.__wrapped__))


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        (build.TARGETS["avx512_bf16"][1], "avx512_bf16"),
        (build.TARGETS["avx512_bf16"][1] - {"avx512_bf16"}, "avx512"),
        (build.TARGETS["avx512_bf16"][1] - {"avx512_vnni"}, "avx512"),
        (build.TARGETS["avx2"][1] | {"avx512f"}, "avx2"),
        (frozenset(), "generic"),
    ],
)
def test_the_best_target_that_the_cpu_runs(flags: frozenset[str], target: str) -> None:
    assert build.native_target(flags) == target


def test_the_name_changes_with_target_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = build.library_name("generic")
    assert name != build.library_name("avx2")
    (tmp_path / "a.cpp").write_text("int changed;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.library_name("generic") != name


def test_compiles_once_and_leaves_nothing_else(
    empty_cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path_factory.mktemp("csrc")
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    first = build.find_or_build("generic")
    written = first.stat().st_mtime_ns
    assert build.find_or_build("generic") == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in empty_cache.iterdir()] == [first.name]


def test_of_two_that_start_together_one_compiles(
    empty_cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("compiler")
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }')
    compiler, log = folder / "c++", folder / "log"
    compiler.write_text(f'#!/bin/sh\necho called >> {log}\nsleep 0.3\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build.find_or_build, ["generic"] * 2)
    assert first == second
    assert log.read_text().splitlines() == ["called"]


def test_a_library_beside_the_package_is_preferred(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = empty_cache / "package" / build.library_name("generic")
    shipped.parent.mkdir()
    shipped.write_bytes(b"")
    monkeypatch.setenv("PATH", "")
    assert build.find_or_build("generic") == shipped


def test_a_failing_compiler_is_quoted(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.BuildError, match="false failed for target generic"):
        build.find_or_build("generic")
    assert not list(empty_cache.iterdir())


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(build.BuildError, match="unknown kernel target 'sse9'"):
        build.build_into(targets=["sse9"])


@pytest.mark.usefixtures("empty_cache", "fresh_library")
def test_without_a_compiler_torch_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
    assert [record.message for record in caplog.records if "install g++" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("fresh_library")
def test_the_reference_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert native.library_for(torch.ones(1)) is None


@pytest.mark.usefixtures("fresh_library")
def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "fast")
    with pytest.raises(ValueError, match="choose reference"):
        native.library()
