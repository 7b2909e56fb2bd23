"""Reading a DisaggDeployment from a file that a user wrote, with errors that say where and what."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.problems import describe_problems


class ManifestError(ValueError):
    """The file is not a valid DisaggDeployment; the text says why."""


def load(path: str) -> DisaggDeployment:
    """The one DisaggDeployment in a YAML or JSON file; `-` reads standard input. Raises ManifestError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: not YAML: {error}") from error
    found = [document for document in documents if _is_ours(document)]
    if len(found) != 1:
        raise ManifestError(
            f"{path}: needs exactly one {names.KIND} of {names.API_VERSION}, has {len(found)} "
            f"among {len(documents)} documents"
        )
    try:
        return DisaggDeployment.from_manifest(found[0])
    except ValidationError as error:
        raise ManifestError(f"{path}: {describe_problems(error)}") from error


def _is_ours(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and document.get("kind") == names.KIND
        and document.get("apiVersion") == names.API_VERSION
    )
