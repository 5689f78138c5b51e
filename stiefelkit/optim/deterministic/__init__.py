"""Optimizers of deterministic losses: each asks the closure as often as it needs, and decides by what it returns."""
