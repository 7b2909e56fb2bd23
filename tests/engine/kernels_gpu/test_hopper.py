"""Every kernel is compiled for the GPU that it is meant for, which needs none; the interpreter forgives too much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = (  # each kernel, and each way to read what is stored; the module by itself compiles all combinations
    *("gather fp8-584", "scatter nvfp4-288", "attention plain", "index scores mxfp4-68", "experts fp8, masked"),
    *("experts fp4, contiguous", "hyper-connection mix", "hyper-connection update"),
)
SHARED_BYTES_OF_A_BLOCK = 227 * 1024  # Hopper


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    """In a process of its own: here Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.engine.kernels_gpu.hopper", *CASES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    kernels = {each["kernel"] for each in compiled}
    assert kernels == {
        "_gather",
        "_scatter",
        "_attend_part",
        "_add_parts",
        "_score",
        "_grouped_product",
        "_mix",
        "_update",
    }
    for each in compiled:
        assert each["shared_bytes"] <= SHARED_BYTES_OF_A_BLOCK, each
        assert each["stack_bytes"] == 0, f"registers are spilled: {each}"
