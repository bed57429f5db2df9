"""LoRA files by the names of other programs: one file for each family's table, and what reads and writes through it.

A [r, in] and B [out, r] are the two matrices of a module, and its update is s * B @ A with s = alpha / r.
"""
