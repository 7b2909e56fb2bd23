"""Run every end-to-end test with pytest; the one-machine cluster is brought up when KUBECONFIG names none.

The scenarios of this folder come first, then the operator's own tests on a cluster. `tests/cluster` is about the
one-machine cluster itself (it cuts the power of a node), so it comes last, and only on that cluster.
With --long it runs those that wait for an outage, a power cut or a time limit to pass, without it all others. Anything
else on the command line is pytest's.
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
    arguments = [argument for argument in sys.argv[1:] if argument != "--long"]
    chosen = "e2e and long" if "--long" in sys.argv else "e2e and not long"
    options = ["-m", chosen, "-p", "no:cacheprovider", "-q", "--durations=8"]
    sys.exit(pytest.main([*options, *(arguments or map(str, folders))]))
