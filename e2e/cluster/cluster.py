#!/usr/bin/env python3
"""Runs a real Kubernetes on this machine; `--help` tells how. Needs nothing beyond Python's standard library."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from onemachine.cli import main

if __name__ == "__main__":
    sys.exit(main())
