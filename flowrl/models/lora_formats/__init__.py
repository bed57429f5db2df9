"""LoRA files by the names of other programs: the families' tables, and what reads through them.

A [r, in] and B [out, r] are the two matrices of a module, and its update is s * B @ A with s = alpha / r.
"""
