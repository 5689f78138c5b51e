"""A map that can be made can be drawn; one that cannot is refused before the module is touched."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors

INNER = [
    ("cayley", {}),
    ("cayley", {"negative": 2}),
    ("cayley", {"negative": [-1, 1, 1, -1, 1, 1]}),
    ("cayley", {"bandwidth": 1}),
    ("cayley", {"bandwidth": 2, "negative": 1}),
    ("householder", {"reflections": 2}),
    ("givens", {"layers": 2}),
    ("matrix_exp", {}),
    ("fourier", {}),
    ("stiefel", {}),
    ("rebased", {"inner": "cayley", "inner_options": {"bandwidth": 1}}),
]


def attached(name, dtype, **options) -> Any:
    """The layer, or None if it is refused and left alone."""
    layer = nn.Linear(6, 6, dtype=dtype)
    before, keys = layer.weight.detach().clone(), list(layer.state_dict())
    try:
        return sk.orthogonal(layer, "weight", name, **options)
    except (errors.OptionError, errors.DtypeError):
        assert torch.equal(layer.weight, before)
        assert list(layer.state_dict()) == keys
        return None


def require_usable(layer):
    for _ in range(2):
        weight = layer.weight.detach()
        assert torch.isfinite(weight).all()
        drift = sk.drift(layer)["weight"]
        assert drift.error < 1e-5
        layer.load_state_dict(layer.state_dict())
        assert torch.equal(layer.weight, weight)
        sk.reset_(layer, "weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("inner", "options"), INNER)
def test_whatever_is_rebased_is_drawn_or_refused(inner, options, dtype):
    layer = attached("rebased", dtype, inner=inner, inner_options=options)
    alone = attached(inner, dtype, **options)
    if layer is None:
        assert alone is None or "identity" not in alone.parametrizations.weight.param.schemes
        return
    require_usable(layer)
    layer.weight = sk.init.haar((6, 6), torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    sk.rebase_(layer, "weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("u", "v"), list(itertools.product(range(len(INNER)), range(0, len(INNER), 2))))
def test_whatever_a_margin_is_made_of_is_drawn_or_refused(u, v, dtype):
    (u, u_options), (v, v_options) = INNER[u], INNER[v]
    layer = attached("margin", dtype, u=u, v=v, u_options=u_options, v_options=v_options)
    if layer is None:
        assert attached(u, dtype, **u_options) is None or attached(v, dtype, **v_options) is None
        return
    require_usable(layer)
