"""Run the end-to-end scenarios: brings up the one-machine cluster when KUBECONFIG names none, then pytest on this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.exit(pytest.main([str(here), "-p", "no:cacheprovider", "-q", "--durations=8", *sys.argv[1:]]))
