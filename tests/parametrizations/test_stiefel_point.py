"""The frame as its own coordinate: values, dtypes, checkpoints, counts, groups, geoopt."""

import copy
from typing import Any

import geoopt
import pytest
import torch
from optimizers_at_hand import descend
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.metrics import orthogonality_error, permitted_error, rounding_limit
from stiefelkit.optim import geoopt_parameters, parameter_groups
from stiefelkit.testing import seeds
from stiefelkit.weights import find

COMPLEX = pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["real", "complex"])
KEY = "parametrizations.weight.original0"
pytestmark = pytest.mark.filterwarnings("ignore:Complex modules")


def make(rows=6, columns=4, dtype=torch.float32, **options) -> Any:
    layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
    return sk.orthogonal(layer, "weight", "stiefel", **options)


def frame_of(layer) -> Any:
    return sk.coordinates(layer, "weight")["stiefel"]


def haar(rows, columns, dtype, seed=0):
    exact = torch.complex128 if dtype.is_complex else torch.float64
    return init.haar((rows, columns), exact, seeds.generator(seed))


# Values


@COMPLEX
def test_an_assigned_frame_is_the_coordinate_and_the_weight(dtype):
    layer = make(dtype=dtype)
    w = haar(6, 4, dtype)
    layer.weight = w
    assert torch.equal(frame_of(layer), w.to(dtype))
    assert torch.equal(layer.weight, w.to(dtype))
    assert frame_of(layer).data_ptr() != w.data_ptr()


@COMPLEX
def test_the_gradient_is_that_of_the_weight(dtype):
    layer = make(dtype=dtype)
    g = torch.randn(6, 4, dtype=dtype)
    before = frame_of(layer).detach().clone()
    layer.weight.backward(g)
    assert torch.equal(frame_of(layer).grad, g)
    with torch.no_grad():
        layer.weight.mul_(2)  # shares no memory with the frame
    assert torch.equal(frame_of(layer), before)


def test_a_wide_weight_is_the_adjoint_of_its_frame():
    layer = make(3, 5, torch.complex64)
    assert frame_of(layer).shape == (5, 3)
    assert torch.equal(layer.weight, frame_of(layer).mH)


def test_restricted_is_a_draw_of_the_restricted_capacity_map():
    drawn = make(8, 8, torch.complex64, init="restricted", generator=seeds.generator(3))
    layer: Any = nn.Linear(8, 8, bias=False, dtype=torch.complex64)
    fourier = sk.orthogonal(layer, "weight", "fourier", generator=seeds.generator(3))
    assert torch.dist(drawn.weight, fourier.weight) <= 4 * rounding_limit(8, torch.complex64)
    assert orthogonality_error(drawn.weight) <= permitted_error(8, torch.complex64)


def test_frames_that_are_not_square_and_complex_have_no_restricted_scheme():
    for columns, dtype in ((6, torch.float32), (4, torch.complex64)):
        with pytest.raises(errors.OptionError, match="restricted"):
            make(6, columns, dtype, init="restricted")


# Dtypes


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_a_half_precision_weight_is_a_float32_frame_rounded_once(cast):
    layer = make()
    w = layer.weight.detach().clone()
    layer.to(cast)
    assert (layer.weight.dtype, frame_of(layer).dtype) == (cast, torch.float32)
    assert torch.equal(layer.weight, w.to(cast))
    assert torch.equal(layer.float().weight, w)
    assert frame_of(sk.orthogonal(nn.Linear(4, 6).to(cast), "weight", "stiefel")).dtype == torch.float32


@pytest.mark.parametrize("cast", ["bfloat16", "half", "float", "double"])
@pytest.mark.parametrize("name", ["stiefel", "rebased", "margin"])
def test_a_complex_frame_keeps_its_imaginary_part_whatever_it_is_cast_to(cast, name):
    options: Any = {"rebased": {"inner": "stiefel"}, "margin": {"u": "stiefel"}}.get(name, {})
    layer: Any = sk.orthogonal(nn.Linear(4, 4, bias=False, dtype=torch.complex64), "weight", name, **options)
    w = layer.weight.detach().clone()
    for changed in (getattr(layer, cast)(), layer.to(getattr(torch, cast))):
        assert changed.weight.dtype.is_complex
        assert torch.allclose(changed.weight.to(torch.complex64), w, atol=1e-6)
        for parameter in changed.parameters():
            assert parameter.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize(("dtype", "finer"), [("float32", "float64"), ("complex64", "complex128")])
def test_a_frame_that_is_cast_up_is_a_frame_in_the_finer_dtype(dtype, finer):
    dtype, finer = getattr(torch, dtype), getattr(torch, finer)
    layer = make(dtype=dtype)
    w = layer.weight.detach().clone()
    state = layer.state_dict()
    cast, loaded, assigned = copy.deepcopy(layer).to(finer), make(dtype=finer), make(dtype=finer)
    loaded.load_state_dict(state)
    assigned.load_state_dict(state, assign=True)
    for other in (cast, loaded, assigned):
        assert frame_of(other).dtype == other.weight.dtype == finer
        assert orthogonality_error(other.weight) <= permitted_error(4, finer)
        assert torch.dist(other.weight, w) <= 4 * rounding_limit(4, dtype) + orthogonality_error(w)


@pytest.mark.parametrize("shape", [(6, 6), (6, 4)])
@pytest.mark.parametrize(("name", "options"), [("rebased", {"inner": "cayley"}), ("matrix_exp", {})])
@pytest.mark.parametrize(("dtype", "finer"), [("float32", "float64"), ("complex64", "complex128")])
def test_a_frame_in_a_chart_that_is_cast_up_is_one_before_it_is_read_or_saved(name, options, dtype, finer, shape):
    dtype, finer = getattr(torch, dtype), getattr(torch, finer)
    layer: Any = sk.orthogonal(nn.Linear(*shape[::-1], bias=False, dtype=dtype), "weight", name, init="haar", **options)
    layer.to(finer)
    chart = {key: value.clone() for key, value in layer.named_buffers()}
    w = layer.weight.detach().clone()
    state = layer.state_dict()
    assert torch.equal(layer.weight, w)
    assert all(torch.equal(value, chart[key]) for key, value in layer.named_buffers())
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(layer.weight, w)


@pytest.mark.parametrize("name", ["rebased", "matrix_exp", "stiefel"])
def test_another_memory_format_keeps_frames_that_are_looked_at(name):
    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.randn(2, 5, 3, dtype=torch.complex64))
    sk.orthogonal(module, "weight", name)
    w = module.weight.detach().clone()
    module.to(memory_format=torch.channels_last)
    copied = copy.deepcopy(module)  # which looks at values
    copied.load_state_dict(module.state_dict())
    assert torch.equal(copied.weight, w)
    average = copy.deepcopy(module)
    for t in [*average.parameters(), *average.buffers()]:
        if t.is_floating_point() or t.is_complex():
            t.data.mul_(0.9)
    average.state_dict()
    if name == "rebased":
        assert torch.dist(average.weight, w) < 1e-5


def test_a_gradient_is_cast_along():
    layer = make(dtype=torch.complex64)
    layer.weight.backward(torch.ones(6, 4, dtype=torch.complex64) * 1j)
    layer.to(torch.bfloat16)
    assert torch.equal(frame_of(layer).grad, torch.ones(6, 4, dtype=torch.complex64) * 1j)


# Checkpoints


@COMPLEX
def test_a_checkpoint_that_holds_no_frame_is_refused_before_anything_is_written(dtype):
    net = nn.Sequential(nn.Linear(6, 6), make(dtype=dtype))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    state = {
        key: 1.01 * value if value.is_floating_point() or value.is_complex() else value for key, value in before.items()
    }
    for load in (
        sk.check_state_dict,
        lambda module, s: module[1].load_state_dict({k[2:]: v for k, v in s.items() if k[0] == "1"}),
    ):
        with pytest.raises(errors.CheckpointError, match="orthonormal"):
            load(net, state)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


# Groups and counts


def test_groups_name_the_manifold_and_their_state_loads_by_the_safe_default(tmp_path):
    net = nn.Sequential(make(), make(3, 3, torch.complex64), nn.Linear(2, 2))
    groups = parameter_groups(net, lr=1e-3, stiefel=dict(lr=1e-6, manifold="stiefel:euclidean"))
    (group,) = [group for group in groups if group.get("name") == "stiefel"]
    assert (group["manifold"], group["lr"], len(group["params"])) == ("stiefel:euclidean", 1e-6, 2)
    (default,) = [group for group in parameter_groups(net, lr=1.0) if group.get("name") == "stiefel"]
    assert default["manifold"] == "stiefel:canonical"
    optimizer = torch.optim.SGD(groups)
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    assert torch.load(tmp_path / "o.pt", weights_only=True)["param_groups"][1]["manifold"] == "stiefel:euclidean"


def test_unknown_manifolds_and_manifolds_of_free_coordinates_are_refused():
    with pytest.raises(errors.OptionError, match="euclidean"):
        parameter_groups(make(), lr=1.0, stiefel=dict(manifold="stiefel:euclidian"))
    layer = sk.orthogonal(nn.Linear(4, 4), "weight", "cayley")
    with pytest.raises(errors.OptionError, match="manifold"):
        parameter_groups(layer, lr=1.0, skew=dict(manifold="stiefel:canonical"))


def test_a_composite_has_the_manifolds_of_its_parts_under_its_names():
    layer: Any = sk.orthogonal(nn.Linear(4, 4), "weight", "margin", u="stiefel")
    assert find.coordinate_manifolds(nn.Sequential(layer)) == {"0.weight.u.stiefel": "stiefel:canonical"}
    groups = {group.get("name"): group for group in parameter_groups(layer, lr=1.0, stiefel=0.5)}
    assert (groups["u.stiefel"]["manifold"], groups["u.stiefel"]["lr"]) == ("stiefel:canonical", 0.5)
    assert "manifold" not in groups["spectrum"]


@pytest.mark.parametrize(
    ("shape", "dtype", "dimension"),
    [((6, 6), torch.bfloat16, 15), ((6, 4), torch.complex64, 48 - 16), ((3, 5, 2), torch.float32, 3 * 7)],
)
def test_parameters_are_counted_by_the_dimension_of_the_manifold(shape, dtype, dimension):
    holder: Any = nn.Module()
    holder.weight = nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))
    sk.orthogonal(holder, "weight", "stiefel")
    assert sk.models.count_parameters(holder) == dimension
    sk.bake(holder, "weight")
    assert sk.models.count_parameters(holder) == holder.weight.numel() * (2 if dtype.is_complex else 1)


# geoopt


@COMPLEX
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_geoopt_trains_the_frame_in_place_and_what_it_trained_loads_anywhere(dtype, metric, tmp_path):
    net: Any = nn.Sequential(make(5, 5, dtype), make(5, 5, dtype))
    frame_of(net[1]).requires_grad_(False)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    params = geoopt_parameters(net, metric)
    assert [p.requires_grad for p in params] == [True, False]
    assert all(
        torch.equal(value, before[key]) and type(value) is torch.Tensor for key, value in net.state_dict().items()
    )
    assert all(p is q for p, q in zip(params, geoopt_parameters(net, metric), strict=True))
    target = haar(5, 5, dtype, seed=1).to(dtype)
    optimizer = geoopt.optim.RiemannianAdam(params, lr=1e-2)
    losses = descend(optimizer, lambda: (net[0].weight - target).abs().square().sum(), 20)
    assert losses[-1] < losses[0]
    assert sk.drift(net)["0.weight"].error < 1e-6
    assert torch.equal(frame_of(net[1]), before["1." + KEY])
    torch.save(net.state_dict(), tmp_path / "w.pt")
    other: Any = nn.Sequential(make(5, 5, dtype), make(5, 5, dtype))
    other.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    for each in (other, copy.deepcopy(net)):
        assert torch.equal(each[0].weight, net[0].weight)


def test_an_empty_frame_stays_empty_as_geoopts():
    net = make().to_empty(device="cpu")
    geoopt_parameters(net)
    with pytest.raises(errors.UnfilledError):
        net.weight  # noqa: B018
