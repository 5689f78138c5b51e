"""Random lives of random models, beside a plain float64 twin: `python -m benchmarks.fuzz`.

`plan` draws a case as plain data, `layers` makes the layers and their twins, `steps` retakes those of optimizers by
their formulas, `world` holds what lives and what must be true of it, `events` is what may happen, `run` carries a case
out and finds the smallest form of one that fails.
"""
