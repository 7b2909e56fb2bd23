"""Computes draft_expected.safetensors with NVIDIA's NeMo AutoModel: what drafters propose, in code that is not ours.

    python -m tests.reference.draft_oracle

DeepSeek-V4's MTP layer and V4.1's DSpark, on the tiny checkpoints. V4-0731's DSpark is in no independent implementation
that runs on a CPU; the plain reference makes it of what these two and transformers' V4 confirm.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.reference import nemo
from tests.reference.v41_oracle import RUN_LIMIT_SECONDS

from headrace_engine.models.tiny import write_tiny

EXPECTED = Path(__file__).parent / "draft_expected.safetensors"
FAMILIES = ("v4", "v41")
NUM_TOKENS = 40  # five windows of the tiny models


def draft_tokens() -> list[int]:
    rng = random.Random("drafts")
    return [rng.randrange(3, 272) for _ in range(NUM_TOKENS)]


def main() -> None:
    python = nemo.install()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for family in FAMILIES:
            write_tiny(folder / family, family, 0)
        (folder / "tokens.txt").write_text(" ".join(map(str, draft_tokens())))
        worker = Path(__file__).with_name("draft_oracle_worker.py")
        result = folder / "expected.safetensors"
        subprocess.run([str(python), str(worker), str(folder), str(result)], check=True, timeout=RUN_LIMIT_SECONDS)
        shutil.copyfile(result, EXPECTED)
    print(f"{EXPECTED}: {EXPECTED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
