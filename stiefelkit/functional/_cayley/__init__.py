"""The Cayley transform of packed tangent vectors, its inverse, and what steps take of it."""
