"""What the suites of others expect and is otherwise here on purpose: each with its reason, refused or failing as said.

`docs/peer-suites.md` shows this list, and `test_differences.py` holds the page and the list to each other.
"""

import builtins
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit import errors

__all__ = ["DIFFERENCES", "Difference", "mark_differences"]


@dataclass(frozen=True)
class Difference:
    """One thing that differs: what a suite does, what comes of it here, and why; as code that is refused, or as tests.

    Args:
        suite: whose, "torch", "geoopt" or "pymanopt".
        what: what it does.
        instead: what comes of it here.
        why: the reason.
        attempt: does it, and is refused.
        tests: a pattern of the names of its tests, which fail.
        may_pass: whether they need not, as where rounding decides.
    """

    suite: str
    what: str
    instead: str
    why: str
    attempt: Callable[[], Any] | None = None
    tests: str = ""
    may_pass: bool = False

    @property
    def error(self) -> type[Exception]:
        """The error that `instead` names, where it is refused."""
        (name,) = re.findall(r"`(\w+Error)`", self.instead)
        return getattr(errors, name, None) or getattr(builtins, name)

    @property
    def row(self) -> str:
        """The row of the table on the page."""
        return f"| {self.suite} | {self.what} | {self.instead} | {self.why} |"


def mark_differences(suite: str, items: list[pytest.Item]) -> None:
    """Has pytest expect that tests of what differs fail, and no others."""
    for item in items:
        for difference in DIFFERENCES:
            if difference.suite == suite and difference.tests and re.search(difference.tests, item.nodeid):
                kinds, strict = (AssertionError, errors.StiefelkitError), not difference.may_pass
                item.add_marker(pytest.mark.xfail(reason=difference.why, raises=kinds, strict=strict))


def _framed(map: str = "cayley", **options: Any) -> Any:
    return sk.orthogonal(nn.Linear(4, 4, bias=False), "weight", map, **options)


def _stepped(optimizer: Callable[..., Any], map: str = "cayley", **options: Any) -> Callable[[], Any]:
    def step() -> None:
        layer = _framed(map)
        layer(torch.ones(2, 4)).square().sum().backward()
        optimizer(layer.parameters(), **options).step()

    return step


def _held(*members: Tensor, **options: Any) -> Any:
    held = list(members) or [nn.Parameter(torch.eye(4, 3))]
    return sk.optim.CayleyAdam([{"params": held, "manifold": "stiefel:canonical", **options}], lr=0.1)


def _twice() -> Any:
    w = nn.Parameter(torch.eye(3))
    return _held(w, w)


DIFFERENCES = (
    Difference(
        "torch",
        "weights of `nn.RNN`, `nn.LSTM`, `nn.GRU`",
        "`OptionError`, which names what to use",
        "they keep lists of their own and would read the weights as they were",
        lambda: sk.orthogonal(nn.LSTM(4, 4), "weight_hh_l0"),
    ),
    Difference(
        "torch",
        "weights of lazy modules before the first batch",
        "`OptionError`; taken after it",
        "they have no shape yet",
        lambda: sk.orthogonal(nn.LazyLinear(4), "weight"),
    ),
    Difference(
        "torch",
        "kernels of convolutions without `view=`",
        "`ShapeError`, which lists the views",
        "a kernel is a matrix in several ways, and they differ in what the layer keeps",
        lambda: sk.orthogonal(nn.Conv2d(3, 3, 2), "weight"),
    ),
    Difference(
        "torch",
        "embeddings with `max_norm` or `padding_idx`",
        "`OptionError`",
        "`max_norm` scales rows of the frame, `padding_idx` leaves one out",
        lambda: sk.orthogonal(nn.Embedding(5, 4, padding_idx=0), "weight"),
    ),
    Difference(
        "torch",
        "a forward pass on the meta device",
        "`UnfilledError`",
        "a weight that a loader has left without values is reported at its first read",
        lambda: _framed().to("meta")(torch.ones(2, 4, device="meta")),
    ),
    Difference(
        "torch",
        'any optimizer of torch\'s on frames (`"stiefel"`)',
        "`OptimizerError` before the first step, which names one that moves them",
        "it would take them off the manifold",
        _stepped(torch.optim.SGD, "stiefel", lr=0.1),
    ),
    Difference(
        "torch",
        "`Muon` on coordinates",
        "torch's `ValueError`",
        "coordinates are vectors, and their weight needs no such step; `ManifoldMuon` takes Muon's step on frames",
        _stepped(torch.optim.Muon),
    ),
    Difference(
        "torch",
        "`SparseAdam` on coordinates",
        "torch's `RuntimeError`",
        "every entry of a frame depends on every coordinate, so their gradients are dense",
        _stepped(torch.optim.SparseAdam),
    ),
    Difference(
        "torch",
        "`differentiable=True` of our optimizers",
        "`OptionError`",
        "a step ends in a projection and a rounding, and records no graph",
        lambda: _held(differentiable=True),
    ),
    Difference(
        "torch",
        "`weight_decay` of frames",
        "`OptionError`; other groups accept it",
        "frames cannot shrink",
        lambda: _held(weight_decay=0.1),
    ),
    Difference(
        "torch",
        "a frame twice in a group; torch only warns",
        "`OptionError`",
        "it would be moved twice, the second time from an old place",
        _twice,
    ),
    Difference(
        "geoopt",
        "`proju` in the canonical metric as U − W U^H W",
        "the orthogonal projection, in either metric",
        "geoopt's doubles the part of a tangent vector within the columns, so it is not a projection",
        tests=r"test_vector_projection_via_assert\[.*-CanonicalFrames-",
    ),
    Difference(
        "geoopt",
        "`dist` along a tangent vector of length 6.7 or 7.1 is that length",
        "the length of a shorter geodesic to the same point",
        "the vector leaves the ball in which geodesics are shortest",
        tests=r"test_dist\[.*-CanonicalFrames-NotScaled\]",
    ),
    Difference(
        "geoopt",
        "`dist` of float32 products to a part in 10⁷",
        "right to a rounding",
        "a rounding of float32 is more than that",
        tests=r"test_dist\[.*-ProductManifold0-Scaled\]",
        may_pass=True,
    ),
    Difference(
        "geoopt",
        "a step with a zero gradient moves a frame by 10⁻⁶",
        "the same bits",
        "without a gradient a frame stays where it is",
        tests=r"test_init_manifold",
    ),
    Difference(
        "geoopt",
        "steps from a matrix that is not a frame",
        "`NotAFrameError`, with the distance",
        "no step from it gives a frame; `projx` gives the nearest",
        lambda: sk.manifolds.Stiefel().retr(torch.ones(3, 2), torch.ones(3, 2)),
        tests=r"test_sampling_manifold",
    ),
    Difference(
        "geoopt",
        "conjugate gradients by Fletcher and Reeves with c₂ = 0.99 converge from one start",
        "end early from some starts, geoopt's manifold from others",
        "their directions need c₂ < ½ to lead downwards",
        tests=r"test_rwolfe_stiefel\[fr-wolfe-.*-line_search_params1\]",
        may_pass=True,
    ),
    Difference(
        "pymanopt",
        "`typical_dist` of a sphere is π",
        "√p, as of all frames",
        "a sphere is a Stiefel manifold here, of one column",
        tests=r"(TestSphereManifold|TestProductManifold)::test_typical_dist",
    ),
)
"""In the order of the page."""
