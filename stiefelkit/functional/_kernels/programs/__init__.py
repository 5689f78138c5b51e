"""Small maps, their gradients and steps as Triton programs: one takes a matrix from its coordinates to the end.

All matrices are real: a complex one is [[Re, -Im], [Im, Re]], twice as large. They are padded with the identity to N
rows, and lie in scratch memory of the program, which stays in the cache; only the inversion is in registers. Products
are exact in their dtype, float64 or float32, never TF32. A program that is done with a matrix takes the next.

They need triton: `launch` imports them, by names of its own, where that is known to be there.
"""

from .butterflies import rows_backward, rows_forward, rows_transform
from .cayley import run_backward, run_forward
from .exponential import run_exponential, run_exponential_back
from .meshes import mesh_backward, mesh_forward, mesh_turns
from .parts import run_skew, run_skew_back
from .reflectors import reflectors_backward, reflectors_forward
from .step import run_commit, run_moments, run_step

__all__ = [
    "mesh_backward", "mesh_forward", "mesh_turns", "reflectors_backward", "reflectors_forward", "rows_backward",
    "rows_forward", "rows_transform", "run_backward", "run_commit", "run_exponential", "run_exponential_back",
    "run_forward", "run_moments", "run_skew", "run_skew_back", "run_step",
]  # fmt: skip
