"""Python dependencies as a folder, from the pinned requirements, without what no CPU process opens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import devicecode
from .console import ClusterError, run
from .files import digest_of
from .layout import PROJECT_ROOT

PYTHON_VERSION = "3.11"
PLATFORM = "x86_64-manylinux_2_31"  # what the newest wheels want; the images have glibc 2.36

# Globs below site-packages. These images run on machines without a GPU; images/engine.Containerfile keeps everything.
# Libraries that libtorch_cuda.so is linked with must stay: the loader wants them even where no GPU is.
GPU_ONLY = (
    "triton",  # compiles GPU kernels
    "triton-*.dist-info",
    "nixl_ep*",  # expert parallelism between GPUs
    "nvidia/cudnn/lib/libcudnn_*",  # opened by libcudnn.so at the first convolution on a GPU
    "nvidia/cu13/lib/libcufftw.so.*",  # nobody links with it, like those that follow
    "nvidia/cu13/lib/libcusolverMg.so.*",
    "nvidia/cu13/lib/libnvblas.so.*",
    "nvidia/cu13/lib/libnvrtc.alt.so.*",
    "nvidia/cu13/lib/libnvrtc-builtins.alt.so.*",
    "nvidia/cu13/lib/libnvperf_*",
    "nvidia/cu13/lib/libpcsamplingutil.so",
    "nvidia/cu13/lib/libcheckpoint.so",
    "torch/lib/libtorch_cuda_linalg.so",  # opened at the first linear algebra on a GPU
)
BUILD_ONLY = (
    "nvidia/*/include",
    "nvidia/*/lib/*.a",
    "torch/include",
    "torch/share",
    "torch/bin/protoc*",
)


@dataclass(frozen=True)
class Dependencies:
    """What to install, what to leave out, and the modules whose import proves that the rest is enough."""

    name: str
    requirements: tuple[Path, ...]
    left_out: tuple[str, ...]
    proof: tuple[str, ...]

    def digest(self) -> str:
        return digest_of(
            [*(path.read_bytes() for path in self.requirements), *self.left_out, *devicecode.SECTIONS, PLATFORM]
        )


ENGINE = Dependencies(
    "engine",
    (PROJECT_ROOT / "requirements" / "engine.txt",),
    GPU_ONLY + BUILD_ONLY,
    (
        "torch",
        "torch.distributed",
        "numpy",
        "nixl._api",
        "safetensors.torch",
        "tokenizers",
        "aiohttp",
        "zmq",
        "msgspec",
    ),
)
OPERATOR = Dependencies(
    "operator",
    (PROJECT_ROOT / "requirements" / "operator.txt", PROJECT_ROOT / "requirements" / "router.txt"),
    (),
    ("kopf", "kubernetes.client", "pydantic", "aiohttp", "uvloop", "msgspec", "prometheus_client"),
)


def install(dependencies: Dependencies, site_packages: Path) -> None:
    """Fills `site_packages`. Raises ClusterError if a hash differs or the proof does not import afterwards."""
    requirements = [word for path in dependencies.requirements for word in ("--requirement", path)]
    where = ["--target", site_packages, "--python-version", PYTHON_VERSION, "--python-platform", PLATFORM]
    # The files are complete, and --no-deps keeps out what the project's overrides leave out.
    how = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--compile-bytecode", "--quiet"]
    what = f"installing {dependencies.name} dependencies"
    run([*_uv(), "pip", "install", *how, *where, *requirements], what, timeout_seconds=1800)
    for pattern in dependencies.left_out:
        for path in site_packages.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    devicecode.blank_below(site_packages)
    _prove_imports(dependencies, site_packages)


def _prove_imports(dependencies: Dependencies, site_packages: Path) -> None:
    """Imports everything with a Python that sees nothing but the standard library and this folder."""
    program = "\n".join(
        ["import sys", f"sys.path.insert(0, {str(site_packages)!r})", *(f"import {m}" for m in dependencies.proof)]
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-I", "-S", "-B", "-c", program]
    done = subprocess.run(python, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, env=env)
    if done.returncode != 0:
        last_lines = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise ClusterError(f"the {dependencies.name} image would lack something that it imports:\n  {last_lines}")


def _uv() -> list[str]:
    """uv, which the project's environment is made with, from the PATH or as a module."""
    if sys.version_info[:2] != (3, 11):
        raise ClusterError(f"images are made with Python {PYTHON_VERSION}; this is {sys.version.split()[0]}")
    found = shutil.which("uv")
    argv = [found] if found else ["python3", "-m", "uv"]
    try:
        run([*argv, "--version"], "looking for uv")
    except ClusterError:
        raise ClusterError("uv is not installed; `make setup` installs it") from None
    return argv
