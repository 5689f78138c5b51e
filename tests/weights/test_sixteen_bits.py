"""Training in 16 bits: coordinates stay finite, and who steps float16 parameters beside them by an eps of 0 is told."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk

FREE = [name for name in sk.available() if name not in ("fourier", "stiefel")]
DTYPES = [torch.float16, torch.bfloat16]
DIVIDING = ["Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adamax"]


def net(dtype: Any = torch.float16, name: str = "cayley") -> Any:
    torch.manual_seed(0)
    return nn.Sequential(sk.orthogonal(nn.Linear(4, 4), "weight", name), nn.Linear(4, 3)).to(dtype)


def said(model: Any, optimizer: Any, steps: int = 3) -> list[str]:
    """What is said while a model is trained on inputs and outputs of which some get no gradient at all."""
    x = torch.randn(8, 4).to(model[1].weight.dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            model(x)[:, 0].square().mean().backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def is_finite(model: Any) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FREE)
def test_coordinates_of_weights_in_16_bits_stay_finite_whatever_eps_is_in_their_dtype(name, dtype):
    layer = sk.orthogonal(nn.Linear(4, 4, bias=False), "weight", name).to(dtype)
    for kind in DIVIDING:
        optimizer = getattr(torch.optim, kind)(sk.optim.parameter_groups(layer, lr=0.1))
        for scale in (0.0, 1e-6, 1.0, 0.0):
            optimizer.zero_grad()
            layer(torch.eye(4, dtype=dtype))[0, 0].mul(scale).backward()
            optimizer.step()
    assert is_finite(layer)
    assert layer.weight.dtype == dtype
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", DIVIDING)
def test_an_eps_that_is_0_in_float16_is_said_once_and_the_remedies_stay_finite(kind, foreach):
    model, make = net(), getattr(torch.optim, kind)
    optimizer = make(sk.optim.parameter_groups(model, lr=1e-3), foreach=foreach)
    (text,) = said(model, optimizer)
    assert f"{kind} needs an eps that is not 0 in float16, got {optimizer.defaults['eps']:g}" in text
    assert "NaN" in text
    assert not is_finite(model)
    for dtype, options in ((torch.float16, {"eps": 1e-4}), (torch.bfloat16, {})):
        model = net(dtype)
        groups = sk.optim.parameter_groups(model, lr=1e-3)
        assert said(model, make(groups, foreach=foreach, **options), 20) == []
        assert is_finite(model)


@pytest.mark.parametrize("kind", ["CayleyAdam", "MultiplicativeCayley", "Landing"])
def test_an_optimizer_of_frames_says_it_of_the_parameters_beside_them(kind):
    model = net(name="stiefel")
    (text,) = said(model, getattr(sk.optim, kind)(sk.optim.parameter_groups(model, lr=1e-3)), 1)
    assert text.startswith(f"{kind} needs an eps that is not 0 in float16")
    model = net(name="stiefel")
    assert said(model, getattr(sk.optim, kind)(sk.optim.parameter_groups(model, lr=1e-3), eps=1e-4)) == []
    assert is_finite(model)


class Elsewhere(torch.optim.Adam):
    """Steps as it likes, perhaps in float32."""

    def step(self, closure: Any = None) -> Any:
        return closure
