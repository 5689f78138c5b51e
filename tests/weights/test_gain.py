"""Weights that are a frame times a gain: fixed, or learned as a coordinate of its own."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import check_frame, load_chart_
from stiefelkit.parametrizations import Cayley, Householder, Scaled
from stiefelkit.testing import check_parametrization, seeds
from stiefelkit.testing.cases import saved_and_loaded

LEARNED: dict[str, Any] = {"gain": "learned"}


class LearnedCayley(Scaled):
    def __init__(self, shape, *, dtype=None, device=None, precision="exact"):
        super().__init__(Cayley(shape, dtype=dtype, device=device, precision=precision), "learned")

    @classmethod
    def examples(cls):
        return [((4, 3), {})]


class DoubleHouseholder(LearnedCayley):
    def __init__(self, shape, *, dtype=None, device=None, precision="exact"):
        Scaled.__init__(self, Householder(shape, dtype=dtype, device=device, precision=precision), 2)

    @classmethod
    def examples(cls):
        return [((2, 3, 2), {})]


class DividedHouseholder(Scaled):
    """A scaled map divided by its gain, which is a map to frames."""

    def __init__(self, shape, *, dtype=None, device=None, precision="exact"):
        super().__init__(Householder(shape, dtype=dtype, device=device, precision=precision), math.sqrt(2))

    @classmethod
    def examples(cls):
        return [((2, 3, 2), {}), ((5, 4), {})]

    def forward(self, *coordinates):
        return (super().forward(*coordinates) / self._split(coordinates)[1]).to(self.dtype)

    def linear(self, x, *coordinates):
        return super().linear(x, *coordinates) / self._split(coordinates)[1]

    def frames(self, weight):
        return self.inner.frames(weight)

    def right_inverse(self, w):
        check_frame(self, w)
        return super().right_inverse(w * (3.0 if self.gain is None else self.gain))


# Those that do not ask for a frame.
LAWS = ["frames", "gradients", "pure", "threads", "finite_gradients", "precision", "schemes", "linear", "checkpoint"]
LAWS += ["functional_call", "forward_mode", "batched_gradients"]


@pytest.mark.parametrize("cls", [LearnedCayley, DoubleHouseholder])
@pytest.mark.parametrize("law", LAWS)
def test_laws_that_do_not_ask_for_a_frame_hold(cls, law):
    check_parametrization(cls, [law])


@pytest.mark.parametrize("law", ["frames", "gradients", "batch", "round_trip", "decay", "contract"])
def test_divided_by_its_gain_a_scaled_map_keeps_the_laws_of_frames(law):
    check_parametrization(DividedHouseholder, [law])


def test_a_batch_with_one_learned_gain_is_the_loop():
    param = LearnedCayley((2, 3, 4, 3), dtype=torch.float64)
    (skew, _), _ = param.initial("haar", seeds.generator(3))
    gain = torch.tensor([1.7], dtype=torch.float64)
    together = param(skew, gain)
    single = LearnedCayley((4, 3), dtype=torch.float64)
    for i, j in itertools.product(range(2), range(3)):
        load_chart_(single, {name: value[i, j] for name, value in param.chart.items()})
        assert torch.dist(single(skew[i, j], gain), together[i, j]) < 1e-14


@pytest.mark.parametrize(("law", "dtype"), [("second_derivatives", "float64"), ("compile", "complex64")])
def test_a_scaled_map_has_second_derivatives_and_compiles(law, dtype):
    check_parametrization(LearnedCayley, [law], only=f"LearnedCayley-4x3-{dtype}")


def test_a_frame_comes_back_from_a_learned_gain():
    map = LearnedCayley((6, 4), dtype=torch.float32)
    for g in (1e-3, 1.0, 300.0):
        w = (g * sk.init.haar((6, 4))).float()
        assert torch.linalg.matrix_norm(map(*map.right_inverse(w)) - w) <= g * map.return_bound


@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "stiefel", "rebased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (7, 3), (3, 7)])
@pytest.mark.parametrize("gain", [math.sqrt(2), "learned"])
def test_the_weight_is_the_gain_times_a_frame_and_drift_measures_the_frame(name, dtype, rows, columns, gain):
    layer: Any = nn.Linear(columns, rows, dtype=dtype)
    old = layer.weight.detach().clone()
    sk.orthogonal(layer, "weight", name, gain=gain)
    nearest = sk.functional.nearest_frame(old)
    g = math.sqrt(2) if gain != "learned" else torch.linalg.svdvals(old).mean().item()
    assert torch.allclose(layer.weight, g * nearest, atol=2e-6)
    measured = sk.drift(layer)["weight"]
    assert measured.error <= sk.metrics.permitted_error(min(rows, columns), dtype)
    layer(torch.randn(2, columns, dtype=dtype)).abs().sum().backward()
    grads: list[Any] = [c.grad for c in sk.coordinates(layer, "weight").values()]
    assert all(torch.isfinite(g).all() for g in grads)


def test_a_learned_gain_is_one_coordinate_trained_in_a_group_of_its_own():
    layer: Any = sk.orthogonal(nn.Linear(4, 4), "weight", init="haar", **LEARNED)
    assert {key: tuple(c.shape) for key, c in sk.coordinates(layer, "weight").items()} == {"skew": (6,), "gain": (1,)}
    assert layer.parametrizations.weight.gain.item() == 1.0
    groups = sk.optim.parameter_groups(layer, lr=0.1, gain=0.5)
    assert [(group.get("name"), group["lr"]) for group in groups] == [(None, 0.1), ("skew", 0.1), ("gain", 0.5)]
    optimizer = torch.optim.SGD(groups)
    w = layer.weight
    (3 * w.norm()).backward()
    optimizer.step()
    assert layer.parametrizations.weight.gain.item() == pytest.approx(1 - 0.5 * 3 * 2, rel=1e-5)
    assert torch.allclose(layer.weight, -2 * w, atol=1e-4)


@pytest.mark.parametrize("gain", [0.5, "learned"])
def test_a_gain_times_a_frame_is_assigned_and_kept(gain):
    w = 0.5 * sk.init.haar((4, 6)[::-1]).mT.float()
    layer: Any = nn.Linear(6, 4)
    layer.weight.data.copy_(w)
    sk.orthogonal(layer, "weight", gain=gain)
    assert torch.allclose(layer.weight, w, atol=1e-6)
    layer.weight = -w
    assert torch.allclose(layer.weight, -w, atol=1e-6)
    before = layer.weight.detach().clone()
    for wrong in [torch.ones(4, 6), 0 * w] + [2 * w] * (gain == 0.5):
        with pytest.raises(errors.NotAFrameError, match="gain"):
            layer.weight = wrong
    assert torch.equal(layer.weight, before)
    sk.assign_(layer, "weight", w.double())
    sk.reset_(layer, "weight")
    scale = torch.linalg.matrix_norm(layer.weight, 2).item()
    assert scale == pytest.approx(1.0 if gain == "learned" else 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("layer", "options", "gain"),
    [
        (lambda: nn.Linear(4, 16), {}, 2.0),
        (lambda: nn.Linear(16, 4), {}, 0.5),
        (lambda: nn.Linear(8, 8), {}, 1.0),
        (lambda: nn.Linear(4, 32), {"blocks": 2}, 2.0),
        (lambda: nn.Conv2d(2, 18, 3), {"view": "out_by_rest"}, 1.0),
        (lambda: nn.Conv2d(4, 16, 3), {"view": "per_tap"}, 2.0),
        (lambda: nn.Conv2d(9, 4, 3), {"view": "in_by_rest"}, 2.0),
        (lambda: nn.ConvTranspose2d(4, 16, 3), {"view": "per_tap"}, 2.0),
        (lambda: nn.Embedding(4, 16), {}, 2.0),
        (lambda: nn.Embedding(16, 4), {}, 0.5),
        (lambda: nn.EmbeddingBag(4, 32), {"blocks": 2, "dim": 1}, 2.0),
    ],
)
def test_the_gain_called_rms_is_the_root_of_outputs_over_inputs(layer, options, gain):
    module = sk.orthogonal(layer(), "weight", gain="rms", **options)
    other = sk.orthogonal(layer(), "weight", gain=gain, **options)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module.weight, other.weight)
    frames = module.parametrizations.weight.param
    assert frames.options().get("gain", 1.0) == gain


def test_an_embedding_and_a_head_of_one_parameter_have_no_common_gain_rms():
    def tied() -> nn.Sequential:
        net = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16, bias=False))
        net[1].weight = net[0].weight
        return net

    with pytest.raises(errors.OptionError, match="parameter"):
        sk.orthogonal(tied(), where="*.weight", gain="rms")
    net: Any = sk.orthogonal(tied(), where="*.weight", gain=2.0)
    assert torch.equal(net[0].weight, net[1].weight)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (48, 32), (32, 32)])
@pytest.mark.parametrize("optimizer", [sk.optim.SPEL, sk.optim.ManifoldMuon])
def test_with_the_gain_rms_one_rate_moves_outputs_alike_whatever_the_shape(optimizer, shape):
    layer: Any = sk.orthogonal(nn.Linear(shape[1], shape[0]), "weight", "stiefel", gain="rms")
    before = layer.weight.detach().clone()
    moving = optimizer(sk.optim.parameter_groups(layer, lr=0.02))
    (layer.weight * torch.randn(shape, generator=seeds.generator())).sum().backward()
    moving.step()
    change = torch.linalg.matrix_norm(layer.weight.detach() - before, 2) * (shape[1] / shape[0]) ** 0.5
    assert 0.9 * 0.02 <= change <= 1.2 * 0.02


@pytest.mark.parametrize("gain", [0, math.nan, "learnd"])
def test_what_is_no_gain_is_refused(gain):
    layer: Any = nn.Linear(4, 4)
    with pytest.raises(errors.OptionError, match="positive"):
        sk.orthogonal(layer, "weight", gain=gain)
    assert not hasattr(layer, "parametrizations")


def test_checkpoints_say_the_gain():
    kinds: list[dict[str, Any]] = [{}, {"gain": 2.0}, {"gain": 3.0}, LEARNED]
    layers = [sk.orthogonal(nn.Linear(4, 4), "weight", **kind) for kind in kinds]
    for i, a in enumerate(layers):
        for j, b in enumerate(layers):
            if i == j:
                twin = copy.deepcopy(b)
                sk.reset_(twin, "weight")
                twin.load_state_dict(a.state_dict())
                assert torch.equal(twin.weight, a.weight)
                continue
            with pytest.raises(errors.CheckpointError, match="weight needs a checkpoint"):
                b.load_state_dict(a.state_dict())
    state = layers[3].state_dict()
    state["parametrizations.weight.original1"] = torch.tensor([3e4])
    layers[3].load_state_dict(state)
    assert sk.drift(layers[3])["weight"].error < 1e-6


def test_a_scaled_layer_moves_casts_bakes_and_is_saved_as_any_other():
    layer: Any = sk.nn.OrthogonalLinear(128, 128, parametrization="householder", reflections=4, gain=2.0)
    x = torch.randn(3, 128)
    assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5)
    assert torch.equal(saved_and_loaded(layer, weights_only=False).weight, layer.weight)
    half: Any = sk.orthogonal(nn.Linear(64, 64, dtype=torch.bfloat16), "weight", **LEARNED)
    assert half.weight.dtype == torch.bfloat16
    assert all(c.dtype == torch.float32 for c in sk.coordinates(half, "weight").values())
    kept = half.weight.detach().clone()
    half.weight = kept
    assert torch.dist(half.weight.float(), kept.float()) < 0.05 * kept.float().norm()
    w = layer.weight.detach().clone()
    assert torch.equal(sk.bake(layer, "weight").weight, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (3, 5)])
def test_a_weight_of_another_scale_is_told_what_takes_it(shape, dtype):
    n, p = shape
    frame = sk.init.haar((max(shape), min(shape))).to(dtype)
    frame = frame if n >= p else frame.mT
    layer: Any = sk.orthogonal(nn.Linear(p, n, dtype=dtype), "weight", gain=2.0)
    with pytest.raises(errors.NotAFrameError, match="values from 3 to 3"):
        layer.weight = 3 * frame
    layer.weight = 3 * frame * (2 / 3)
    for gain in (3, "learned"):
        sk.orthogonal(sk.bake(layer, "weight"), "weight", gain=gain)
        layer.weight = 3 * frame
    for wrong in (frame.cumsum(0), 0 * frame):
        with pytest.raises(errors.NotAFrameError):
            layer.weight = wrong


def test_no_gain_is_the_weight_without_one():
    layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", gain=None)
    assert torch.allclose(layer.weight @ layer.weight.mT, torch.eye(4), atol=1e-6)
