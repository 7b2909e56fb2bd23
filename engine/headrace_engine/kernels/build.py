"""Compiles the kernels in csrc/ to a shared library, once per content, flags and CPU.

The library's name carries a key: a hash of the sources, the flags and the target. It is looked for beside this file
(put there by `build_into`, e.g. when an image is made), then in the cache folder ($HEADRACE_KERNEL_CACHE, by default
~/.cache/headrace/kernels); then it is compiled into the cache. Of processes that start together one
compiles and the others wait for it; a finished library is renamed into place, so that none sees half a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
_COMPILE_SECONDS = 300.0
_POLL_SECONDS = 0.1

_FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # the last two: GCC 12's own headers
)

# Targets, best first: compiler flags, and the CPU flags (as in /proc/cpuinfo) that the result needs.
_AVX512_CPU = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"})
TARGETS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512_bf16": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
        _AVX512_CPU | {"avx512_bf16", "avx512_vnni"},
    ),
    "avx512": (("-march=x86-64-v4", "-mprefer-vector-width=512"), _AVX512_CPU),
    "avx2": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "bmi2", "f16c"})),
    "generic": ((), frozenset()),
}


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why and what to do."""


def native_target(cpu_flags: frozenset[str] | None = None) -> str:
    """The best target that this CPU runs (or one with these flags)."""
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    return next(name for name, (_, needed) in TARGETS.items() if needed <= flags)


def find_or_build(target: str | None = None) -> Path:
    """The library for `target` (default: this CPU's best), compiled if there is none yet. Raises BuildError."""
    target = target or native_target()
    name = library_name(target)
    for folder in (Path(__file__).parent, cache_folder()):
        if (folder / name).is_file():
            return folder / name
    library = cache_folder() / name
    with _only_one(library.parent):
        return library if library.is_file() else _compile(target, library)


def build_into(folder: Path | None = None, targets: Iterable[str] = ()) -> list[Path]:
    """Compiles `targets` (default: this CPU's best; "all": each of this architecture) into `folder`.

    The default folder is the package's own, where an engine finds the library without a compiler. Raises BuildError.
    """
    folder = folder or Path(__file__).parent
    names = list(targets) or [native_target()]
    if names == ["all"]:
        names = list(TARGETS) if _is_x86() else ["generic"]
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise BuildError(f"unknown kernel target {unknown[0]!r}: choose from {', '.join(TARGETS)}, all")
    with _only_one(folder):
        return [_compile(name, folder / library_name(name)) for name in names]


def library_name(target: str) -> str:
    """File name of the library of these sources, flags and target."""
    key = hashlib.blake2b(digest_size=8)
    for part in (platform.machine(), target, *_FLAGS, *TARGETS[target][0]):
        key.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            key.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"headrace_kernels_{target}_{key.hexdigest()}.so"


def cache_folder() -> Path:
    override = os.environ.get("HEADRACE_KERNEL_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "kernels"


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """While one process compiles into `folder` (made if there is none), others wait here, but not for ever."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _no_folder(folder, error) from error
    try:
        deadline = time.monotonic() + _COMPILE_SECONDS
        # A file system without locks, or whoever holds it hanging: compiling twice does no harm.
        with suppress(OSError):
            while not _is_locked_now(handle) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _is_locked_now(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _no_folder(folder: Path, error: OSError) -> BuildError:
    return BuildError(f"cannot compile into {folder}: {error}; set HEADRACE_KERNEL_CACHE to a writable folder")


def _compile(target: str, library: Path) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise BuildError("there is no C++ compiler: install g++ (or set CXX), or run `headrace-engine kernels build`")
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            output = Path(scratch) / library.name
            sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
            command = [*compiler.split(), *_FLAGS, *TARGETS[target][0], *sources, "-o", str(output)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
            if result.returncode:
                raise BuildError(f"{compiler} failed for target {target}:\n{result.stderr[-2000:]}")
            output.replace(library)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} did not finish in {_COMPILE_SECONDS:.0f} s") from error
    except OSError as error:
        raise _no_folder(library.parent, error) from error
    return library


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _cpu_flags() -> frozenset[str]:
    """The CPU's flags as Linux names them; empty where it does not say, which selects `generic`."""
    if not _is_x86():
        return frozenset()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()
