"""From the spec to objects: pure functions that return plain dicts, the same bytes for the same input."""
