"""The engine's CPU kernels, compiled once for this machine with the compiler that is in the images."""

from __future__ import annotations

import platform
import shutil
import tempfile
from pathlib import Path

from .console import run
from .files import digest_of, digest_of_files
from .layout import PROJECT_ROOT

PACKAGE = PROJECT_ROOT / "engine" / "headrace_engine" / "kernels"
IN_SITE_PACKAGES = "headrace_engine/kernels"  # the engine looks beside its own files first
COMPILE_TIMEOUT_SECONDS = 600

# build.py needs nothing but the standard library, so it runs without its package (which would import torch). It is told
# the CPU's flags: there is no /proc where it runs.
PROGRAM = """\
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import build

build.build_into(Path(sys.argv[1], "output"), [build.native_target(frozenset(sys.argv[2].split()))])
"""


def digest() -> str:
    """Changes with the sources, the way they are compiled and the CPU."""
    return digest_of([digest_of_files(_sources(), PACKAGE), PROGRAM, platform.machine(), _cpu_flags()])


def compile_into(root: Path, rootfs: Path) -> None:
    """Compiles inside `rootfs`, whose C library is the images' own, and puts the library below `root`."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=rootfs / "tmp") as folder:
        for path in _sources():
            copy = Path(folder) / path.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        arguments = [Path("/tmp") / Path(folder).name, _cpu_flags()]
        what = "compiling the engine's CPU kernels"
        run(
            ["chroot", rootfs, "/usr/bin/python3", "-c", PROGRAM, *arguments],
            what,
            timeout_seconds=COMPILE_TIMEOUT_SECONDS,
        )
        for library in (Path(folder) / "output").glob("*.so"):
            shutil.copy2(library, root / library.name)


def _sources() -> list[Path]:
    return [PACKAGE / "build.py", *(path for path in (PACKAGE / "csrc").rglob("*") if path.is_file())]


def _cpu_flags() -> str:
    """As Linux names them, blank between; none where it does not say."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("flags")), "")
