"""Putting maps on weights, assigning, resetting, baking and measuring."""

import copy
import logging
from typing import Any

import pytest
import torch
from optimizers_at_hand import descend
from torch import nn
from torch.nn.utils import parametrize

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing import seeds

SQUARE = (lambda: nn.Linear(3, 3), "weight")


def frame(*shape, dtype=torch.float32):
    return sk.init.haar(shape, torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_that_is_a_frame_is_kept(dtype):
    layer = with_weight(frame(7, 7).to(dtype))
    before = layer.weight.detach().clone()
    sk.orthogonal(layer, "weight", "cayley")
    bound = 8 * rounding_limit(7, torch.float32) + orthogonality_error(before).item()
    assert torch.linalg.matrix_norm(layer.weight - before) <= bound
    assert dtype == torch.float32 or sk.drift(layer)["weight"].error < 1e-14


@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "stiefel", "rebased", "margin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (7, 4), (4, 7)])
def test_an_ordinary_weight_becomes_the_frame_nearest_to_it(name, dtype, rows, columns):
    layer = nn.Linear(columns, rows, dtype=dtype)
    u, _, vh = torch.linalg.svd(layer.weight.detach().to(working_dtype(dtype)), full_matrices=False)
    state = torch.get_rng_state()
    sk.orthogonal(layer, "weight", name)
    assert torch.allclose(layer.weight.to(u.dtype), u @ vh, atol=2e-6)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_where_no_reflection_is_in_the_image_the_nearest_rotation_is_taken(n, dtype):
    w = torch.randn(3, n, n, dtype=dtype)
    w[torch.linalg.det(w) > 0] *= torch.tensor([-1.0] + [1.0] * (n - 1), dtype=dtype)
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(w.clone())
    sk.orthogonal(layer, "weight", "matrix_exp")
    # ||W - R||^2 = ||W||^2 + n - 2 tr R^T W, of which the trace is at most s_1 + ... + s_(n-1) - s_n.
    s = torch.linalg.svdvals(w.double())
    nearest = s.square().sum(-1) + n - 2 * (s.sum(-1) - 2 * s[:, -1])
    found = (layer.weight.double() - w.double()).square().sum((-2, -1))
    assert torch.allclose(found, nearest, rtol=1e-5)
    assert torch.allclose(torch.linalg.det(layer.weight), torch.ones(3, dtype=dtype))


def with_weight(w) -> Any:
    layer: Any = nn.Linear(w.shape[1], w.shape[0], dtype=w.dtype)
    layer.weight.data = w
    return layer


@pytest.mark.parametrize(
    ("weight", "name", "options"),
    [
        (torch.zeros(6, 6), "cayley", {}),
        (torch.full((6, 6), float("nan")), "margin", {}),
        (torch.randn(6, 6), "cayley", {"negative": 0}),
        (torch.randn(6, 6), "householder", {"reflections": 1}),
        (torch.randn(6, 6, dtype=torch.complex64), "fourier", {}),
        (torch.randn(6, 6), "margin", {"u_options": {"negative": 1}}),
    ],
)
def test_what_has_no_nearest_frame_in_the_image_is_drawn_by_the_default_scheme(weight, name, options):
    first, second = with_weight(weight.clone()), with_weight(weight.clone())
    seeds.reseed(3)
    sk.orthogonal(first, "weight", name, **options)
    seeds.reseed(3)
    scheme = first.parametrizations.weight.param.schemes[0]
    sk.orthogonal(second, "weight", name, init=scheme, **options)
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize(
    ("weight", "options", "expected"),
    [
        (2 * torch.eye(3), {}, ["encoder.weight", "1.73"]),
        (torch.eye(3), {}, []),
        (2 * torch.eye(3), {"init": "haar"}, []),
        (torch.ones(3, 3), {}, ["drawn anew by 'haar'", "linearly independent"]),
    ],
)
def test_what_became_of_a_weight_is_logged_once(weight, options, expected):
    said, logger = [], logging.getLogger("stiefelkit")
    before, handler = logger.level, logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = nn.ModuleDict({"encoder": with_weight(weight.clone())})
        sk.orthogonal(model, "encoder.weight", **options)
        sk.drift(model)
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    assert len(said) == bool(expected)
    assert all(text in said[0] for text in expected)


def test_assignment_copies_and_never_aliases():
    layer = sk.orthogonal(nn.Linear(4, 4), "weight", "cayley")
    w = frame(4, 4)
    layer.weight = w
    kept = layer.weight.detach().clone()
    w.zero_()
    assert torch.equal(layer.weight, kept)
    layer.weight = nn.Parameter(frame(4, 4))
    sk.assign_(layer, "weight", kept.double())
    assert torch.allclose(layer.weight, kept, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (torch.ones(4, 4), errors.NotAFrameError),
        (torch.eye(5), errors.ShapeError),
        (torch.full((4, 4), float("nan")), errors.NonFiniteError),
        (torch.eye(4, dtype=torch.complex64), errors.DtypeError),
    ],
)
def test_a_refused_assignment_changes_nothing(value, error):
    layer = sk.orthogonal(nn.Linear(4, 4), "weight", "cayley")
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(error):
        layer.weight = value
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())


def test_half_precision_tolerance_refuses_what_is_no_frame():
    layer = sk.orthogonal(nn.Linear(64, 64, dtype=torch.bfloat16), "weight", "cayley")
    with pytest.raises(errors.NotAFrameError):
        layer.weight = 0.9 * torch.eye(64, dtype=torch.bfloat16)
    layer.weight = frame(64, 64).bfloat16()


@pytest.mark.parametrize(("rows", "columns"), [(9, 4), (4, 9), (1, 6), (6, 1), (5, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_tall_weights_get_orthonormal_columns_and_wide_ones_rows(rows, columns, dtype):
    layer = sk.orthogonal(nn.Linear(columns, rows, dtype=dtype), "weight", "cayley")
    w = layer.weight.detach()
    assert w.is_contiguous()
    assert orthogonality_error(w if rows >= columns else w.mH) < 1e-6
    target = frame(max(rows, columns), min(rows, columns), dtype=dtype)
    target = target if rows >= columns else target.mH
    layer.weight = target
    assert torch.allclose(layer.weight, target, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [(12, 5, torch.float32), (5, 12, torch.float32), (6, 6, torch.complex64)]
)
def test_adamw_with_weight_decay_stays_on_the_manifold_for_a_thousand_steps(rows, columns, dtype):
    layer = sk.orthogonal(nn.Linear(columns, rows, bias=False, dtype=dtype), "weight", "cayley")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = torch.randn(8, columns, dtype=dtype)
    descend(optimizer, lambda: (layer(x) - 1).abs().square().mean(), 1000)
    (measured,) = sk.drift(layer).values()
    assert measured.error <= 1.2 * measured.limit + 1.2e-7


@pytest.mark.parametrize(
    ("layer", "view", "matrix"),
    [
        (nn.Conv2d(3, 8, 3), "out_by_rest", lambda w: w.reshape(8, 27).mT),
        (nn.Conv1d(4, 32, 3), "out_by_rest", lambda w: w.reshape(32, 12)),
        (nn.Conv2d(5, 4, 3), "in_by_rest", lambda w: w.transpose(0, 1).reshape(5, 36).mT),
        (nn.Conv2d(6, 4, 2), "per_tap", lambda w: w.permute(2, 3, 0, 1).mT),
        (nn.ConvTranspose2d(3, 8, 3), "out_by_rest", lambda w: w.transpose(0, 1).reshape(8, 27).mT),
        (nn.Conv2d(4, 8, 3, groups=2), "out_by_rest", lambda w: w.reshape(8, 18).mT),
    ],
)
@pytest.mark.filterwarnings("ignore:Conv2d.weight. a convolution of several groups")
def test_a_kernel_is_orthogonal_as_its_view_says(layer, view, matrix):
    sk.orthogonal(layer, "weight", "cayley", view=view)
    w = layer.weight.detach()
    assert orthogonality_error(matrix(w)).max() < 1e-6
    layer.weight = w
    assert torch.allclose(layer.weight, w, atol=1e-6)
    layer(torch.randn(2, layer.in_channels, *[9] * (w.dim() - 2))).sum().backward()


@pytest.mark.parametrize(
    ("make", "name", "options", "error", "text"),
    [
        (SQUARE[0], "bias", {}, errors.ShapeError, "bias"),
        (*SQUARE, {"parametrization": "caley"}, errors.UnknownNameError, "cayley"),
        (*SQUARE, {"parametrization": nn.Linear}, errors.OptionError, "OrthogonalParam"),
        (*SQUARE, {"negativ": 1}, errors.OptionError, "negative"),
        (*SQUARE, {"parametrization": "fourier"}, errors.DtypeError, "complex64"),
        (*SQUARE, {"init": "har"}, errors.OptionError, "haar"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), "weight", {"negative": 1}, errors.DtypeError, "real"),
        (lambda: nn.Conv2d(3, 3, 3), "weight", {}, errors.ShapeError, "per_tap"),
        (lambda: with_weight(torch.eye(4)), "weight", {"negative": 2}, errors.ImageError, "negative"),
        (lambda: nn.RNN(3, 3), "weight_hh_l0", {}, errors.OptionError, "OrthogonalRNN"),
        (*SQUARE, {"init": torch.ones(3, 3)}, errors.NotAFrameError, "orthonormal"),
        (*SQUARE, {"init": torch.eye(4)}, errors.ShapeError, "(3, 3)"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence_and_leaves_the_module_alone(make, name, options, error, text):
    module = make()
    keys = list(module.state_dict())
    with pytest.raises(error) as caught:
        sk.orthogonal(module, name, **options)
    assert text in str(caught.value)
    assert not parametrize.is_parametrized(module)
    assert list(module.state_dict()) == keys


@pytest.mark.parametrize(
    ("weight", "error"),
    [(torch.zeros(3, 0), errors.ShapeError), (torch.eye(3).to(torch.float8_e4m3fn), errors.DtypeError)],
)
def test_an_empty_weight_or_one_of_8_bits_is_refused(weight, error):
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(error):
        sk.orthogonal(module, "weight")


def test_reset_draws_anew_in_place():
    layer = sk.orthogonal(nn.Linear(5, 5), "weight", "cayley")
    coordinate = sk.coordinates(layer, "weight")["skew"]
    sk.reset_(layer, "weight", init="identity")
    assert torch.equal(layer.weight, torch.eye(5))
    assert sk.coordinates(layer, "weight")["skew"] is coordinate
    sk.reset_(layer, "weight", generator=seeds.generator(1))
    once = layer.weight.detach().clone()
    sk.reset_(layer, "weight", generator=seeds.generator(1))
    assert torch.equal(layer.weight, once)


def test_baking_leaves_one_plain_parameter_with_the_same_bits():
    layer = sk.orthogonal(nn.Linear(4, 6), "weight", "cayley")
    w, twin = layer.weight.detach().clone(), copy.deepcopy(layer)
    sk.bake(twin, "weight")
    assert type(twin) is nn.Linear
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.requires_grad
    assert torch.equal(twin.weight, w)
    assert torch.equal(layer.weight, w)
    assert sorted(twin.state_dict()) == ["bias", "weight"]


def test_a_copy_takes_another_map_without_touching_the_original():
    layer = sk.orthogonal(nn.Bilinear(3, 3, 2), "weight", "cayley")
    twin = copy.deepcopy(layer)
    twin.register_parameter("extra", nn.Parameter(torch.eye(3)))
    sk.orthogonal(twin, "extra", "cayley")
    assert not hasattr(layer, "extra")
    assert layer.weight.shape == (2, 3, 3)


def test_drift_names_weights_and_refuses_nan():
    net = nn.Sequential(nn.Linear(4, 4), sk.orthogonal(nn.Linear(4, 4), "weight", "cayley"))
    assert list(sk.drift(net)) == ["1.weight"]
    assert sk.drift(nn.Linear(2, 2)) == {}
    sk.coordinates(net[1], "weight")["skew"].data[0] = float("nan")
    with pytest.raises(errors.NonFiniteError, match=r"1\.weight"):
        sk.drift(net)
