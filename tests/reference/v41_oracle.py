"""Computes v41_expected.safetensors with NVIDIA's NeMo AutoModel, whose DeepSeek-V4.1 shares no code with ours.

    python -m tests.reference.v41_oracle

The package is installed into an environment of its own (nemo.py). The suite itself needs neither it nor the network:
the file is committed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.reference import nemo
from tests.reference.deepseek_v41 import token_map
from tests.reference.v41_cases import CASES, EXPECTED, case_tokens, make_tokenizer, write_case

RUN_LIMIT_SECONDS = 600


def main() -> None:
    python = nemo.install()
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
