"""The one error that loading a model raises for bad input."""

from __future__ import annotations


class ModelError(ValueError):
    """A checkpoint or its configuration cannot be used. The message says what is wrong, where, and what to do."""
