"""Tensors of geoopt's say which manifold they are on: guarded on ours, and taken at their word by our optimizers."""

from typing import Any

import geoopt
import pytest
import torch
from optimizers_at_hand import OPTIMIZERS
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.manifolds import Stiefel
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import seeds

MANIFOLDS = {
    "ours": (Stiefel(), "stiefel:canonical"),
    "ours, euclidean": (Stiefel("euclidean"), "stiefel:euclidean"),
    "geoopt's, canonical": (geoopt.CanonicalStiefel(), "stiefel:canonical"),
    "geoopt's, euclidean": (geoopt.EuclideanStiefel(), "stiefel:euclidean"),
    "geoopt's, by geodesics": (geoopt.EuclideanStiefelExact(), "stiefel:euclidean"),
}


def parameter(manifold: Any, shape: tuple[int, ...] = (8, 3)) -> Any:
    w = sk.init.haar(shape, generator=seeds.generator()).float()
    return geoopt.ManifoldParameter(w, manifold=manifold)  # type: ignore[call-arg]


def backward(w: Tensor) -> None:
    w.grad = None
    (w * torch.linspace(-1, 1, w.numel()).view(w.shape)).sum().backward()


def is_frame(w: Tensor) -> bool:
    return orthogonality_error(w).max().item() <= 2 * rounding_limit(w.shape[-1], w.dtype)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_a_parameter_on_our_manifold_is_guarded_from_the_first_step(metric, cls):
    w = parameter(Stiefel(metric))
    before = w.detach().clone()
    optimizer = cls([w], lr=0.1)
    backward(w)
    with pytest.raises(errors.OptimizerError, match=rf"{cls.__name__} needs.*\(8 x 3\).*sk\.optim\.frames"):
        optimizer.step(lambda: w.sum())
    assert torch.equal(w, before)
    geoopt.optim.RiemannianAdam([w], lr=0.1).step()
    assert is_frame(w)
    assert not torch.equal(w, before)


def test_frozen_and_free_ones_may_stand_in_any_optimizer():
    w, free = parameter(Stiefel()).requires_grad_(False), nn.Parameter(torch.ones(2))
    flat = geoopt.ManifoldParameter(torch.ones(4, 2), manifold=geoopt.Euclidean())  # type: ignore[call-arg]
    free.sum().backward()
    flat.sum().backward()
    torch.optim.SGD([w, free, flat], lr=0.1).step()
    assert (flat < 1).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", MANIFOLDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_our_optimizers_take_a_parameter_at_its_word(name, kind):
    manifold, expected = MANIFOLDS[kind]
    w, twin, free = parameter(manifold), parameter(manifold), nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS[name]([w, free], lr=0.05)
    named = OPTIMIZERS[name]([{"params": [twin], "manifold": expected}], lr=0.05)
    assert [group["manifold"] for group in optimizer.param_groups] == [expected, None]
    for _ in range(5):
        for of, stepper in ((w, optimizer), (twin, named)):
            backward(of)
            free.grad = torch.ones(2)
            stepper.step()
    assert is_frame(w)
    assert torch.equal(w, twin)
    assert not torch.equal(w, parameter(manifold))
    assert (free < 1).all()


def test_settings_of_a_group_reach_the_frames_in_it_but_for_weight_decay():
    w, free = parameter(Stiefel()), nn.Parameter(torch.ones(2))
    optimizer = sk.optim.CayleyAdam([{"params": [("free", free), ("w", w)], "lr": 0.3, "weight_decay": 0.1}], lr=0.1)
    plain, bound = optimizer.param_groups
    assert (plain["lr"], plain["weight_decay"], plain["param_names"]) == (0.3, 0.1, ["free"])
    assert (bound["lr"], bound["weight_decay"], bound["param_names"]) == (0.3, 0.0, ["w"])
    other = sk.optim.CayleyAdam([{"params": [("free", free), ("w", w)]}], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[1]["lr"] == 0.3


def test_a_group_without_a_manifold_is_refused_with_a_remedy_that_works():
    w = parameter(Stiefel("euclidean"))
    with pytest.raises(errors.OptimizerError, match=r"in one without; give it sk\.optim\.frames\(\[w\]\)"):
        sk.optim.CayleySGD([{"params": [w], "manifold": None}], lr=0.1)
    (group,) = sk.optim.frames([w])
    assert group["manifold"] == "stiefel:euclidean"
    (group,) = sk.optim.frames([w], manifold="stiefel:canonical")
    assert group["manifold"] == "stiefel:canonical"
    both = sk.optim.frames([w, nn.Parameter(sk.init.haar((4, 2)))], lr=0.1)
    assert [group["manifold"] for group in both] == ["stiefel:euclidean", "stiefel:canonical"]
    sk.optim.CayleySGD(both, lr=0.1)


@pytest.mark.parametrize("make", [sk.optim.CayleyAdam, sk.optim.minimizers.get("lbfgs")])
def test_a_parameter_on_another_manifold_is_refused_in_a_sentence(make):
    w = geoopt.ManifoldParameter(geoopt.Sphere().random_uniform(4, 3))
    with pytest.raises(errors.OptimizerError, match=r"got one on the manifold Sphere; geoopt\.optim\.RiemannianAdam"):
        make([w])
    backward(w)
    geoopt.optim.RiemannianAdam([w], lr=0.1).step()


def test_groups_of_a_model_and_clipping_know_its_parameters_of_geoopt():
    net = nn.Linear(3, 3)
    net.w = parameter(Stiefel("euclidean"))
    plain, bound = sk.optim.parameter_groups(net, lr=0.1, stiefel=0.01)
    assert plain["params"] == [net.weight, net.bias]
    assert (bound["params"][0] is net.w, bound["manifold"], bound["lr"]) == (True, "stiefel:euclidean", 0.01)
    # Constant on the manifold: no part of the gradient is tangent.
    net.w.square().sum().backward()
    assert sk.optim.clip_grad_norm_(net, 1.0).item() < 1e-5


def test_a_scaled_manifold_of_ours_is_guarded():
    manifold: Any = geoopt.Scaled(Stiefel(), 2.0)
    w = geoopt.ManifoldParameter(sk.init.haar((8, 4)), manifold)
    before = w.detach().clone()
    w.grad = torch.ones_like(w)
    with pytest.raises(errors.OptimizerError, match="which must stay on its manifold"):
        torch.optim.Adam([w]).step()
    assert torch.equal(w.detach(), before)
