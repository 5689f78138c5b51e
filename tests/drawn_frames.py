"""Frames with tangent vectors, and the manifolds to try them on."""

import torch

from stiefelkit import init
from stiefelkit.manifolds import RETRACTIONS, Stiefel

METRICS = ("canonical", "euclidean")
DTYPES = (torch.float64, torch.complex128)
SHAPES = [(6, 6), (7, 5), (9, 2), (2, 12, 3), (5, 1)]
ALL = [Stiefel(metric, retraction) for metric in METRICS for retraction in RETRACTIONS]


def drawn(shape, dtype, length=1.0, count=1):
    w = init.haar(shape, dtype)
    vectors = []
    for _ in range(count):
        s = torch.randn(shape, dtype=dtype)
        along = w.mH @ s
        u = s - w @ (along + along.mH) / 2
        vectors.append(length * u / u.norm())
    return w, *vectors
