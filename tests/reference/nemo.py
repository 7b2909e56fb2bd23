"""Where NVIDIA's NeMo AutoModel lives, whose DeepSeek-V4.1 shares no code with ours, and how it gets there.

    python -m tests.reference.nemo

Installs it into an environment of its own, ${HEADRACE_CACHE:-~/.cache/headrace}/oracle-venv: several GB, and some
minutes the first time. Oracles and `make bench-steps-peer` do so by themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.7.0"
PACKAGE = f"nemo-automodel=={VERSION}"  # without its dependencies: most are for training
LIBRARIES = ("torch==2.14.0", "transformers==5.24.0", "safetensors", "tokenizers", "numpy", "pillow")
INSTALL_LIMIT_SECONDS = 1800


def environment() -> Path:
    cache = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace")
    return cache / "oracle-venv"


def python() -> Path:
    """The environment's interpreter, whether it is there or not."""
    return environment() / "bin" / "python"


def _wanted() -> str:
    return "\n".join((PACKAGE, *LIBRARIES))


def _stamp() -> Path:
    return environment() / "headrace-installed"


def is_installed() -> bool:
    return _stamp().is_file() and _stamp().read_text() == _wanted()


def install() -> Path:
    """The environment's interpreter; the environment is made if it is not there."""
    if is_installed():
        return python()
    uv = shutil.which("uv") or "uv"
    for arguments in (
        ("venv", "--quiet", "--allow-existing", "--python", "3.11", str(environment())),
        ("pip", "install", "--quiet", "--python", str(python()), *LIBRARIES),
        ("pip", "install", "--quiet", "--python", str(python()), "--no-deps", PACKAGE),
    ):
        print("+ uv", *arguments, file=sys.stderr, flush=True)
        subprocess.run([uv, *arguments], check=True, timeout=INSTALL_LIMIT_SECONDS)
    _stamp().write_text(_wanted())
    return python()


if __name__ == "__main__":
    install()
    print(f"{PACKAGE} is installed in {environment()}", file=sys.stderr)
