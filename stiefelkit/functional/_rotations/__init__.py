"""Meshes of plane rotations, and the angles of a matrix."""
