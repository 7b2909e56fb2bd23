"""Computes v41_expected.safetensors with NVIDIA's NeMo AutoModel, whose DeepSeek-V4.1 shares no code with ours.

    python -m tests.reference.v41_oracle

The package is installed into an environment of its own, ${HEADRACE_CACHE:-~/.cache/headrace}/oracle-venv (several GB
the first time). The suite itself needs neither it nor the network: the file is committed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.reference.deepseek_v41 import token_map
from tests.reference.v41_cases import CASES, EXPECTED, case_tokens, make_tokenizer, write_case

ORACLE = "nemo-automodel==0.7.0"  # without its dependencies: most are for training
LIBRARIES = ("torch==2.14.0", "transformers==5.24.0", "safetensors", "tokenizers", "numpy", "pillow")
INSTALL_LIMIT_SECONDS = 1800
RUN_LIMIT_SECONDS = 600


def environment() -> Path:
    cache = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace")
    return cache / "oracle-venv"


def install() -> Path:
    """The environment's Python; it is made if it is not there."""
    python = environment() / "bin" / "python"
    stamp = environment() / "headrace-installed"
    wanted = "\n".join((ORACLE, *LIBRARIES))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    uv = shutil.which("uv") or "uv"
    for arguments in (
        ("venv", "--quiet", "--allow-existing", "--python", "3.11", str(environment())),
        ("pip", "install", "--quiet", "--python", str(python), *LIBRARIES),
        ("pip", "install", "--quiet", "--python", str(python), "--no-deps", ORACLE),
    ):
        print("+ uv", *arguments, file=sys.stderr, flush=True)
        subprocess.run([uv, *arguments], check=True, timeout=INSTALL_LIMIT_SECONDS)
    stamp.write_text(wanted)
    return python


def main() -> None:
    python = install()
    num_compressed = len(set(token_map(make_tokenizer())))
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name in CASES:
            write_case(folder / name, name, num_compressed)
            (folder / name / "tokens.txt").write_text(" ".join(map(str, case_tokens(name))))
        worker = Path(__file__).with_name("v41_oracle_worker.py")
        result = folder / "expected.safetensors"
        command = [str(python), str(worker), str(result), *(str(folder / name) for name in CASES)]
        subprocess.run(command, check=True, timeout=RUN_LIMIT_SECONDS)
        shutil.copyfile(result, EXPECTED)
    print(f"{EXPECTED}: {EXPECTED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
