"""The gated recurrence against a step written out, against torch's GRU, and the laws of packed and reversed input."""

from typing import Any

import pytest
import torch

from stiefelkit import errors
from stiefelkit.functional import ACTIVATIONS, find_activation, goru_scan

DOUBLE = torch.float64
M, N = 3, 4


def tensors(steps=5, batch=2, dtype=DOUBLE, seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (steps, batch, M),
        "h0": (batch, N),
        "q": (N, N),
        "w": (2 * N, N),
        "u": (3 * N, M),
        "bias": (2 * N,),
        "activation_bias": (N,),
    }
    drawn = {key: torch.randn(shape, dtype=dtype, generator=source) for key, shape in shapes.items()}
    return {**drawn, "q": torch.linalg.qr(drawn["q"])[0], "activation_bias": 0.1 * drawn["activation_bias"]}


def scanned(*given, **options) -> Any:
    return goru_scan(*given, **options)


def plain(x, h, q, w, u, bias, activation_bias, activation="modrelu"):
    act, outputs = find_activation(activation, False), []
    (w_r, w_g), (u_r, u_g, u_c), (b_r, b_g) = w.chunk(2), u.chunk(3), bias.chunk(2)
    for row in x:
        r, g = torch.sigmoid(row @ u_r.T + h @ w_r.T + b_r), torch.sigmoid(row @ u_g.T + h @ w_g.T + b_g)
        c = act(r * (h @ q.T) + row @ u_c.T, activation_bias)
        h = g * h + (1 - g) * c
        outputs.append(h)
    return torch.stack(outputs), h


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_recurrence_is_its_formula(activation):
    given = tensors()
    out, last = scanned(**given, activation=activation)
    expected, expected_last = plain(given.pop("x"), given.pop("h0"), **given, activation=activation)
    assert torch.allclose(out, expected)
    assert torch.allclose(last, expected_last)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_gated_recurrence_has_the_gradients_of_finite_differences(reverse, last_only):
    given = {key: value.requires_grad_() for key, value in tensors(steps=3).items()}
    names = list(given)

    def run(*values):
        out, last = goru_scan(**dict(zip(names, values, strict=True)), reverse=reverse, last_only=last_only)
        assert (out is None) == last_only
        return last if out is None else (out, last)

    assert torch.autograd.gradcheck(run, tuple(given.values()))


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_rows_are_the_sequences_one_by_one(reverse):
    given, lengths = tensors(steps=4, batch=3), [4, 2, 1]
    x, h0 = given.pop("x"), given.pop("h0")
    sizes = [sum(length > t for length in lengths) for t in range(4)]
    packed = torch.cat([x[t, :size] for t, size in enumerate(sizes)])
    out, last = scanned(packed, h0, **given, batch_sizes=sizes, reverse=reverse)
    steps = out.split(sizes)
    for b, length in enumerate(lengths):
        single, end = scanned(x[:length, b : b + 1], h0[b : b + 1], **given, reverse=reverse)
        assert torch.allclose(torch.stack([steps[t][b] for t in range(length)]), single[:, 0])
        assert torch.allclose(last[b], end[0])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.zeros(4, 3)}, errors.ShapeError, "square q"),
        ({"w": torch.zeros(4, 4)}, errors.ShapeError, "w of shape (8, 4)"),
        ({"u": torch.zeros(8, 3)}, errors.ShapeError, "u of shape (12, 3)"),
        ({"bias": torch.zeros(4)}, errors.ShapeError, "bias of shape (8,)"),
        ({"h0": torch.zeros(3, 4)}, errors.ShapeError, "h0 of shape (2, 4)"),
        ({"x": torch.zeros(0, 2, 3)}, errors.ShapeError, "T >= 1"),
        ({"q": torch.zeros(4, 4, dtype=torch.complex64)}, errors.DtypeError, "real q"),
        ({"backend": "autos"}, errors.UnknownNameError, 'did you mean "auto"'),
        ({"activation": "modrelo"}, errors.UnknownNameError, 'did you mean "modrelu"'),
    ],
)
def test_the_gated_recurrence_says_what_it_needs(change, error, text):
    with pytest.raises(error) as caught:
        goru_scan(**{**tensors(), **change})
    assert text in str(caught.value)
