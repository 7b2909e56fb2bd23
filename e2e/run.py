"""Run every end-to-end test with pytest; the one-machine cluster is brought up when KUBECONFIG names none.

First the scenarios that keep to a namespace of their own, three files at a time: most of what they do is wait. Then,
one at a time, those marked `alone`, which stop the operator, drain a node or count what the whole cluster does; then
`tests/cluster`, about the one-machine cluster itself, only on that cluster.
With --long it runs those that wait for an outage, a power cut or a time limit to pass, or that build Kueue, without it
all others; those run one at a time. Anything else on the command line is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = [ROOT / "e2e", *sorted((ROOT / "tests" / "operator").glob("test_cluster_*.py"))]
OPTIONS = ["-p", "no:cacheprovider", "-q", "--durations=8"]
TOGETHER = ["-n", "3", "--dist", "loadfile"]


def run(marks: str, folders: list[Path], arguments: list[str]) -> int:
    """pytest's exit code for what carries these marks, in the folders or in what the arguments name instead."""
    are_named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    command = [sys.executable, "-m", "pytest", "-m", marks, *OPTIONS, *arguments]
    command += [] if are_named else map(str, folders)
    return subprocess.run(command, cwd=ROOT).returncode


def main(arguments: list[str]) -> int:
    """The first exit code that says more than that all passed, or that nothing was chosen."""
    own = [] if os.environ.get("KUBECONFIG") else [ROOT / "tests" / "cluster"]
    given = [argument for argument in arguments if argument != "--long"]
    if "--long" in arguments:
        return run("e2e and long", [*SCENARIOS, *own], given)
    codes = [
        run("e2e and not long and not alone", SCENARIOS, [*TOGETHER, *given]),
        run("e2e and not long and alone", [*SCENARIOS, *own], given),
    ]
    chosen = [code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED]
    return max(chosen, default=int(pytest.ExitCode.NO_TESTS_COLLECTED))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # pytest has it too, and cleans up
        sys.exit(130)
