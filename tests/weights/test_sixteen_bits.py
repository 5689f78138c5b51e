"""Training in 16 bits: coordinates stay finite."""

import pytest
import torch
from torch import nn

import stiefelkit as sk

FREE = [name for name in sk.available() if name not in ("fourier", "stiefel")]
DTYPES = [torch.float16, torch.bfloat16]
DIVIDING = ["Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adamax"]


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
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer.weight.dtype == dtype
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize("kind", [torch.optim.Adam, sk.optim.CayleyAdam])
def test_an_eps_that_is_0_in_float16_is_said_of_parameters_beside_coordinates(kind):
    model = nn.Sequential(sk.orthogonal(nn.Linear(4, 4), "weight"), nn.Linear(4, 3)).half()
    for dtype, warned in ((torch.float16, True), (torch.bfloat16, False)):
        model.to(dtype)
        optimizer = kind(sk.optim.parameter_groups(model, lr=1e-3))
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        if warned:
            with pytest.warns(UserWarning, match="eps"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
