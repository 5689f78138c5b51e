"""Frames that need no module: a parameter, a group and an optimizer."""

import gc

import geoopt
import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, every_optimizer
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error
from stiefelkit.optim.settings import WEIGHT_DECAY
from stiefelkit.weights import optimizer_hooks


def test_an_optimizer_without_frames_says_so():
    w = nn.Parameter(sk.init.haar((5, 3)))
    for name, cls in OPTIMIZERS.items():
        with pytest.warns(UserWarning, match=rf"{name} holds no frame.*sk\.optim\.frames") as told:
            cls([w], lr=0.1)
        assert told[0].filename == __file__


def test_other_optimizers_are_refused_from_then_on():
    w = nn.Parameter(sk.init.haar((5, 3)))
    free = torch.optim.SGD([w], lr=0.1)
    w.sum().backward()
    free.step()
    w.data = sk.init.haar((5, 3))
    sk.optim.frames(w)
    before = w.detach().clone()
    with pytest.raises(errors.OptimizerError, match=r"SGD needs.*sk\.optim\.frames"):
        free.step()
    with pytest.raises(errors.OptimizerError, match=r"RiemannianSGD needs.*ManifoldParameter"):
        geoopt.optim.RiemannianSGD([w], lr=0.1).step()
    with pytest.raises(errors.OptimizerError, match=r"sk\.optim\.frames"):
        sk.optim.CayleySGD([w], lr=0.1)
    assert torch.equal(w, before)


def test_frames_that_die_are_forgotten():
    w = nn.Parameter(sk.init.haar((5, 3)))
    sk.optim.frames(w)
    key = id(w)
    del w
    gc.collect()
    assert key not in optimizer_hooks.frames()


def test_a_models_groups_know_a_frame_that_is_its_parameter():
    net = nn.Module()
    net.w, net.b = nn.Parameter(sk.init.haar((5, 3))), nn.Parameter(torch.zeros(3))
    sk.optim.frames(net.w)
    plain, bound = sk.optim.parameter_groups(net, lr=0.1, stiefel=0.01)
    assert plain["params"] == [net.b]
    assert bound["params"][0] is net.w
    assert (bound["manifold"], bound["lr"]) == ("stiefel:canonical", 0.01)


def test_a_point_registered_by_torch_itself_is_guarded():
    layer = nn.Linear(4, 4)
    nn.init.orthogonal_(layer.weight)
    point = sk.parametrizations.StiefelPoint((4, 4), dtype=torch.float32)
    nn.utils.parametrize.register_parametrization(layer, "weight", point)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(4)).sum().backward()
    with pytest.raises(errors.OptimizerError, match="SGD needs parameters that may move freely"):
        optimizer.step()
    moving = sk.optim.CayleySGD(sk.optim.parameter_groups(layer, lr=0.1))
    moving.step()
    assert orthogonality_error(layer.weight).item() < 1e-6


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (lambda: torch.randn(5, 3), errors.NotAFrameError, "nearest_frame"),
        (lambda: sk.init.haar((5, 3)).mT.contiguous(), errors.ShapeError, "adjoint"),
        (lambda: torch.nn.Linear(2, 2), errors.DtypeError, "parameter_groups"),
        (list, errors.OptionError, "none"),
    ],
)
def test_what_is_no_frame_is_refused_in_a_sentence(given, error, text):
    with pytest.raises(error, match=text):
        sk.optim.frames(given())


@pytest.mark.parametrize(
    ("w", "text"),
    [(sk.init.haar((5, 3)), "does not require grad"), (sk.init.haar((5, 3)).requires_grad_() * 1, "was computed")],
)
def test_what_cannot_be_trained_is_refused_with_a_remedy_that_works(w, text):
    with pytest.raises(errors.OptionError, match=text):
        sk.optim.frames(w)
    sk.optim.frames(torch.nn.Parameter(w.detach()))


@every_optimizer
def test_weight_decay_that_no_parameter_would_get_is_refused(name):
    if WEIGHT_DECAY in OPTIMIZERS[name].settings:
        with pytest.raises(errors.OptionError, match="weight_decay"):
            OPTIMIZERS[name](sk.optim.frames(nn.Parameter(sk.init.haar((4, 4)))), weight_decay=0.1)
    net = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
    decays = [
        group["weight_decay"]
        for group in OPTIMIZERS[name](sk.optim.parameter_groups(net, 1e-2), weight_decay=0.1).param_groups
    ]
    assert decays == [0.1, 0.0]
