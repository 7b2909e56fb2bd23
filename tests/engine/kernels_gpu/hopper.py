"""Compiles kernels for an H200, without one: `TRITON_INTERPRET=0 python -m tests.engine.kernels_gpu.hopper [CASE ...]`.

Triton's wheel brings the assembler. Prints one line of JSON per kernel: name, shared memory, registers, spilled bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class _NoDevice:
    """Stands for the driver of a GPU that is not here; only what compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(call: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """What `call` would have launched."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(_NoDevice())
    try:
        call()
    finally:
        JITFunction.run = run
    for kernel in kernels:
        usage = _resource_usage(kernel.asm["cubin"])
        yield {"kernel": kernel.metadata.name, "shared_bytes": kernel.metadata.shared, **usage}


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "stack_bytes": found["STACK"] + found["LOCAL"]}


def main() -> None:
    from tests.engine.kernels_gpu.launches import LAUNCHES

    for name in sys.argv[1:] or LAUNCHES:
        for kernel in compiled(LAUNCHES[name]()):
            print(json.dumps({"case": name, **kernel}), flush=True)


if __name__ == "__main__":
    main()
