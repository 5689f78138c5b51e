"""Orthogonality under many optimizer steps."""
