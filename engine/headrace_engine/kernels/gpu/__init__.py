"""Triton kernels for NVIDIA GPUs: reading caches and expert weights as they are stored, and what is made of them.

Nothing selects them yet: the engine computes on the CPU. A module holds one family: the public function (contract,
checks, launch), its torch reference where `kernels` has none, then the kernels. docs/gpu.md says what has run where.
"""
