"""Run the end-to-end scenarios with pytest; the one-machine cluster is brought up when KUBECONFIG names none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.exit(pytest.main([str(here), "-p", "no:cacheprovider", "-q", "--durations=8", *sys.argv[1:]]))
