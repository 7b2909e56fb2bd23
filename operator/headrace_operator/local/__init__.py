"""`headrace up`: the operator's own pods as local processes, for a laptop and for tests."""
