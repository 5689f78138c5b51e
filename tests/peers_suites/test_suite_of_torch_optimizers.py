"""Optimizers, on the inputs that torch tests its own with: torch's of our coordinates, and ours, as torch's do."""

import copy
import inspect
import warnings
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, STATEFUL, every_optimizer, excess, frame, gradient
from their_tests import IS_FULL
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchs_inputs import for_all_optimizers, optim_db, with_flags

import stiefelkit as sk
from stiefelkit import errors

FREE = [
    name
    for name, cls in sk.available().items()
    if cls.__module__.startswith("stiefelkit.") and not cls.supports((4, 4), torch.float32) and name != "stiefel"
]
BY_CLASS = {info.optim_cls: info for info in optim_db}
over_torchs = pytest.mark.parametrize("info", optim_db, ids=lambda info: info.name)
pytestmark = pytest.mark.filterwarnings("ignore:.*moves the frame and regularizes nothing")


def inputs_of(info: Any, flags: bool = True) -> list[dict[str, Any]]:
    found = with_flags("cpu", torch.float32, info) if flags else info.optim_inputs_func(device="cpu")
    return [copy.deepcopy(input.kwargs) for input in found]


class Problem:
    """A layer with an orthogonal weight, a plain twin of its parameters, and a loss of either."""

    def __init__(self, map: str, dtype: torch.dtype = torch.float32):
        self.layer: Any = sk.orthogonal(nn.Linear(4, 4, dtype=dtype), "weight", map)
        self.own = list(self.layer.parameters())
        self.twins = [nn.Parameter(p.detach().clone()) for p in self.own]
        self.x, self.y = torch.randn(2, 8, 4, dtype=dtype)

    def loss(self, values: Sequence[Tensor] | None = None) -> Tensor:
        names = [name for name, _ in self.layer.named_parameters()]
        found = self.layer(self.x)
        if values is not None:
            found = functional_call(self.layer, dict(zip(names, values, strict=True)), self.x)
        return (found - self.y).square().mean()


def train(optimizer: Any, loss: Any, steps: int = 3) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(closure)


def map_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    return [torch.equal(p, q) for p, q in zip(some, others, strict=True)]


REFUSED_BY_TORCH = {"Muon": "only supports 2D parameters", "SparseAdam": "does not support dense gradients"}


@over_torchs
def test_torchs_optimizers_train_coordinates_as_they_train_plain_parameters(info):
    maps = cycle(FREE)
    for options in inputs_of(info):
        if options.get("differentiable"):
            continue
        for map in FREE if IS_FULL else [next(maps)]:
            problem = Problem(map)
            if info.name in REFUSED_BY_TORCH:
                with pytest.raises((ValueError, RuntimeError), match=REFUSED_BY_TORCH[info.name]):
                    train(info.optim_cls(problem.own, **copy.deepcopy(options)), problem.loss)
                continue
            ours, theirs = (info.optim_cls(p, **copy.deepcopy(options)) for p in (problem.own, problem.twins))
            for _ in range(3):
                train(ours, problem.loss, 1)
                for p, q in zip(problem.own, problem.twins, strict=True):
                    q.grad = p.grad.clone()
                if not info.step_requires_closure:
                    theirs.step()
                    assert all(map_equal(problem.own, problem.twins)), (map, options)
            assert map == "margin" or sk.drift(problem.layer)["weight"].error < 1e-6


@over_torchs
def test_torchs_optimizers_are_refused_frames_and_leave_them(info):
    problem = Problem("stiefel")
    before = problem.layer.weight.detach().clone()
    optimizer = info.optim_cls([problem.layer.parametrizations.weight.original0])
    with pytest.raises(errors.OptimizerError, match="which must stay on its manifold"):
        train(optimizer, problem.loss, 1)
    assert torch.equal(problem.layer.weight, before)


DIFFERENTIABLE = [info for info in optim_db if "differentiable" in info.supported_impls and info.name != "Muon"]


@pytest.mark.parametrize("info", DIFFERENTIABLE, ids=lambda info: info.name)
@pytest.mark.parametrize("map", FREE if IS_FULL else FREE[:1])
def test_gradients_go_through_torchs_differentiable_steps_of_coordinates(map, info):
    problem = Problem(map, torch.float64)

    def after(*values: Tensor) -> Tensor:
        moved = [value.clone() for value in values]
        optimizer = info.optim_cls(moved, lr=1e-2, differentiable=True)
        for c, g in zip(moved, torch.autograd.grad(problem.loss(values), values, create_graph=True), strict=True):
            c.grad = g
        optimizer.step()
        return problem.loss(moved)

    at = [p.detach().clone().requires_grad_() for p in problem.own]
    found = torch.autograd.grad(after(*at), at)
    assert all(g.isfinite().all() for g in found)
    assert any(g.abs().max() > 0 for g in found)


def mixed(name: str, free: dict[str, Any] | None = None, **options: Any) -> Any:
    """An optimizer of ours with a frame and a free parameter, and both."""
    w, p = frame((4, 3)), nn.Parameter(torch.linspace(-1, 1, 3))
    groups = [{"params": [w], "manifold": "stiefel:canonical", "weight_decay": 0.0}, {"params": [p], **(free or {})}]
    return OPTIMIZERS[name](groups, **{"lr": 0.05, **options}), w, p


def steps(optimizer: Any, w: Tensor, p: Tensor, count: int = 3, sign: int = 1) -> None:
    for number in range(count):
        w.grad = sign * gradient(w.shape, w.dtype, seed=number)
        p.grad = sign * gradient((3, 1), p.dtype, seed=number).flatten()
        optimizer.step()


@every_optimizer
def test_beside_frames_the_rest_goes_by_torchs_settings_to_the_bit(name):
    info = BY_CLASS[OPTIMIZERS[name].free_optimizer]
    for options in inputs_of(info):
        if options.get("differentiable"):
            continue
        optimizer, w, p = mixed(name, free=options)
        alone = nn.Parameter(p.detach().clone())
        has = inspect.signature(info.optim_cls).parameters
        own = {key: value for key, value in optimizer.defaults.items() if key in has}
        theirs = info.optim_cls([alone], **{**own, **options})
        steps(optimizer, w, p)
        for number in range(3):
            alone.grad = gradient((3, 1), seed=number).flatten()
            theirs.step()
        assert torch.equal(p, alone), options
        assert excess(w) < 2


def framed(params: Any) -> Any:
    """Parameters of torch's inputs, 1 x 1, as frames in groups that say so."""
    twins: dict[int, nn.Parameter] = {}

    def twin(p: Any) -> Any:
        return (p[0], twin(p[1])) if isinstance(p, tuple) else twins.setdefault(id(p), nn.Parameter(torch.ones(1, 1)))

    if isinstance(params, Tensor):
        return twin(params)
    if isinstance(params, set):
        return {twin(p) for p in params}
    groups = params if params and isinstance(params[0], dict) else [{"params": params or [frame((4, 3))]}]
    together = [[group["params"]] if isinstance(group["params"], Tensor) else group["params"] for group in groups]
    return [
        {**group, "params": [twin(p) for p in members], "manifold": "stiefel:canonical"}
        for group, members in zip(groups, together, strict=True)
    ]


@every_optimizer
def test_what_all_of_torchs_optimizers_refuse_ours_refuse(name):
    for error in for_all_optimizers("cpu", torch.float32):
        input = error.optimizer_error_input
        params = [nn.Parameter(torch.ones(2))] if input.params is None else input.params
        for given in (params, framed(input.params)):
            twice = "duplicate parameters" in error.error_regex and given is not params
            kinds = {UserWarning: UserWarning, TypeError: TypeError, FutureWarning: errors.OptionError}
            kind = errors.OptionError if twice else kinds.get(error.error_type, ValueError)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", ".*holds no frame")
                with pytest.raises(kind):
                    OPTIMIZERS[name](given, **copy.deepcopy(input.kwargs))


@every_optimizer
def test_what_its_optimizer_of_the_rest_refuses_it_refuses_anywhere(name):
    info = BY_CLASS[OPTIMIZERS[name].free_optimizer]
    known = {setting.name for setting in OPTIMIZERS[name].settings}
    refused = [error.optimizer_error_input for error in info.optim_error_inputs_func("cpu", torch.float32)]
    for options in [input.kwargs for input in refused if input.params is None]:
        if any(isinstance(beta, Tensor) for beta in options.get("betas", ())):
            # Betas are plain numbers here, whatever they were given as, so that nothing speaks against some tensors.
            optimizer, *_ = mixed(name, free={"betas": options["betas"]})
            assert all(type(beta) is float for group in optimizer.param_groups for beta in group["betas"])
            continue
        for given in ({"free": options}, options) if options.keys() <= known else ({"free": options},):
            with pytest.raises((errors.OptionError, RuntimeError, ValueError)):  # torch's own, of two settings together
                steps(*mixed(name, **given))


@every_optimizer
def test_a_rate_may_be_a_tensor_that_is_written_to(name):
    (optimizer, w, p), (twin, v, q) = mixed(name, lr=0.05), mixed(name, lr=torch.tensor(0.05))
    for factor in (1, 0.5, 0):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * factor
        for group in twin.param_groups:
            group["lr"].fill_(0.05 * factor)
        steps(optimizer, w, p, 1)
        steps(twin, v, q, 1)
    torch.testing.assert_close(v, w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_zero_gradients_move_nothing_and_a_copy_goes_on_the_same(name):
    optimizer, w, p = mixed(name, **STATEFUL[name])
    before = [w.detach().clone(), p.detach().clone()]
    w.grad, p.grad = torch.zeros_like(w), torch.zeros_like(p)
    optimizer.step()
    # A frame may be taken to the one that is nearest to it, no further than rounding has brought it.
    torch.testing.assert_close([w.data, p.data], before, rtol=0, atol=4 * torch.finfo(w.dtype).eps)
    steps(optimizer, w, p)
    twin, v, q = copy.deepcopy((optimizer, w, p))
    for other in ((optimizer, w, p), (twin, v, q)):
        steps(*other)
    assert torch.equal(w, v)
    assert torch.equal(p, q)


@every_optimizer
def test_states_with_names_and_without_go_into_each_other(name):
    def made(named: bool) -> Any:
        w, p = frame((4, 3)), nn.Parameter(torch.ones(3))
        first, second = ([("w", w)], [("p", p)]) if named else ([w], [p])
        groups = [{"params": first, "manifold": "stiefel:canonical"}, {"params": second}]
        return OPTIMIZERS[name](groups, lr=0.05), w, p

    for has, gets in ((True, False), (False, True)):
        (source, *members), (target, *others) = made(has), made(gets)
        steps(source, *members)
        with torch.no_grad():
            for a, b in zip(others, members, strict=True):
                a.copy_(b)
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        assert [group.get("param_names") for group in target.param_groups] == [["w"], ["p"]]
        for made_by in ((source, *members), (target, *others)):
            steps(*made_by, count=1)
        assert all(torch.equal(a, b) for a, b in zip(others, members, strict=True))


@every_optimizer
def test_hooks_are_called_in_their_order(name):
    optimizer, w, p = mixed(name)
    called: list[str] = []

    def noting(word: str) -> Any:
        return lambda *_: called.append(word)

    handles = [
        register_optimizer_step_pre_hook(noting("every pre")),
        register_optimizer_step_post_hook(noting("every post")),
        optimizer.register_step_pre_hook(noting("pre")),
        optimizer.register_step_post_hook(noting("post")),
        optimizer.register_state_dict_pre_hook(noting("saving")),
        optimizer.register_state_dict_post_hook(noting("saved")),
        optimizer.register_load_state_dict_pre_hook(noting("loading")),
        optimizer.register_load_state_dict_post_hook(noting("loaded")),
    ]
    try:
        steps(optimizer, w, p, 1)
        assert called == ["every pre", "pre", "post", "every post"]
        called.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        assert called == ["saving", "saved", "loading", "loaded"]
    finally:
        for handle in handles:
            handle.remove()
    called.clear()
    steps(optimizer, w, p, 1)
    assert not called


def schedulers_of(name: str) -> list[Any]:
    chains = [chain for info in optim_db for chain in info.scheduler_inputs]
    return chains if IS_FULL else list(BY_CLASS[OPTIMIZERS[name].free_optimizer].scheduler_inputs)


@every_optimizer
def test_under_torchs_chains_of_schedulers_the_loss_falls(name):
    for chain in schedulers_of(name):
        target = frame((4, 3), seed=5)
        optimizer, w, p = mixed(name, lr=0.02)
        schedulers = [make(optimizer) for make in chain]

        def loss(w: Any = w, p: Any = p, target: Any = target) -> Tensor:
            return (w - target).square().sum() + p.square().sum()

        first = loss().item()
        for _ in range(25):
            train(optimizer, loss, 1)
            for scheduler in schedulers:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss().item()) if plateau else scheduler.step()
        assert loss().item() < first
        assert excess(w) < 2


@every_optimizer
def test_parameters_need_not_be_contiguous(name):
    (optimizer, w, p), (_, v, q) = mixed(name), mixed(name)
    wide = torch.zeros(3, 4)
    wide.copy_(v.detach().mT)
    turned, spread = nn.Parameter(wide.mT), nn.Parameter(torch.stack([q.detach(), q.detach()], 1)[:, 0])
    groups = [{"params": [turned], "manifold": "stiefel:canonical"}, {"params": [spread]}]
    other = OPTIMIZERS[name](groups, lr=0.05)
    steps(optimizer, w, p)
    steps(other, turned, spread)
    torch.testing.assert_close(turned, w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(spread, p, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_state_dicts_of_earlier_versions_without_flags_are_taken(name):
    for flag in ("foreach", "maximize", "capturable", "fused", "differentiable"):
        optimizer, w, p = mixed(name)
        steps(optimizer, w, p)
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            group.pop(flag, None)
        optimizer.load_state_dict(saved)
        steps(optimizer, w, p)
        assert excess(w) < 2


@every_optimizer
@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_the_momentum_do_so(name, kind):
    optimizer, w, p = mixed(name)
    has = {"momentum", "betas"} & set(optimizer.defaults)

    def make(**more: Any) -> Any:
        if kind == "OneCycleLR":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9, **more)
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, **more)

    if not has:
        with pytest.raises(ValueError, match="optimizer must support momentum"):
            make()
    scheduler = make(cycle_momentum=bool(has))
    seen = []
    for _ in range(8):
        steps(optimizer, w, p, 1)
        scheduler.step()
        group = optimizer.param_groups[0]
        seen.append(group["betas"][0] if "betas" in group else group.get("momentum"))
    assert len(set(seen)) > 2 or not has
    assert excess(w) < 2
