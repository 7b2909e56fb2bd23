"""Run every end-to-end test with pytest; the one-machine cluster is brought up when KUBECONFIG names none.

The scenarios of this folder come first, then the operator's own tests on a cluster. `tests/cluster` is about the
one-machine cluster itself (it cuts the power of a node), so it comes last, and only on that cluster.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    folders = [root / "e2e", root / "tests" / "operator"]
    if not os.environ.get("KUBECONFIG"):
        folders.append(root / "tests" / "cluster")
    options = ["-m", "e2e", "-p", "no:cacheprovider", "-q", "--durations=8"]
    sys.exit(pytest.main([*options, *(sys.argv[1:] or map(str, folders))]))
