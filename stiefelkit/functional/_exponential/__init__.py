"""Exponentials of matrices and of packed tangent vectors, and their logarithms."""
