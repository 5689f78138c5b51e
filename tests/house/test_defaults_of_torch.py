"""torch's defaults and switches change no number: not of a draw, a frame, a gradient, an assignment or a step."""

import ast
import contextlib
import pathlib
from typing import Any

import pytest
import torch
from every_map import over_all_maps
from optimizers_at_hand import OPTIMIZERS, every_optimizer, frame, group
from torch import nn

import stiefelkit as sk
from stiefelkit import models
from stiefelkit.testing import seeds

ROOMS = ("contract", "functional", "manifolds", "models", "nn", "optim", "parametrizations", "scan")
ROOMS = (*ROOMS, "training/tasks", "weights")
NAMES = "arange as_tensor empty eye full hann_window linspace ones rand randint randn randperm tensor triu_indices"
FACTORIES = [f"torch.{name}" for name in (*NAMES.split(), "zeros")]
LIKE_TORCHS_OWN = {"gates.py"}
"""Files that make parameters on the default device, as torch's layers do."""


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    """Fills what is empty with NaN as well."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def without_subnormals():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


SWITCHES: dict[str, Any] = {
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    # It mixes with no other: a tensor that is made there is told.
    "default device meta": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
    "subnormal numbers flushed": without_subnormals,
    "detect anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}
under_each_switch = pytest.mark.parametrize("switch", SWITCHES)


def inputs(*shape, dtype=torch.float32):
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
    return (1.7 * numbers).sin().view(shape).to(dtype)


def changed(work, switch):
    """Returns which results of a function are others under a switch."""
    usual = work()
    with SWITCHES[switch]():
        found = work()
    same = [(a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b) for a, b in zip(usual, found, strict=True)]
    return [i for i, is_same in enumerate(same) if not is_same]


@under_each_switch
@over_all_maps
def test_maps_draw_map_and_take_weights_as_ever(name, dtype, switch):
    def work():
        torch.manual_seed(0)
        layer: Any = nn.Linear(4, 4, dtype=dtype, device="cpu")
        param = sk.available()[name]((4, 4), dtype=dtype, device="cpu")
        sk.orthogonal(layer, "weight", name, init=param.schemes[0])
        w = layer.weight
        w.backward(inputs(4, 4, dtype=dtype))
        found = [w.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)]
        for scheme in param.schemes:
            sk.reset_(layer, "weight", scheme)
            found += [layer.weight.detach(), *(value.clone() for value in layer.state_dict().values())]
        if param.traits.invertible:
            layer.weight = w.detach().clone()
            found.append(layer.weight.detach())
        return found

    assert changed(work, switch) == []


@under_each_switch
@every_optimizer
def test_optimizers_step_as_ever(name, switch):
    def work():
        frames = [frame((6, 6)), frame((9, 4), torch.complex64)]
        optimizer = OPTIMIZERS[name](group(*frames), lr=0.1)
        for _ in range(2):
            for w in frames:
                w.grad = inputs(*w.shape, dtype=w.dtype)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        return [w.detach() for w in frames]

    assert changed(work, switch) == []


@under_each_switch
@pytest.mark.parametrize("name", models.names())
def test_models_run_and_learn_as_ever(name, switch):
    seeds.reseed()
    net: Any = models.create(name, 3, 4, 2)

    def work():
        net.zero_grad()
        out = net(inputs(2, 12, 3))
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]

    assert changed(work, switch) == []


def test_tensors_that_are_made_say_on_which_device():
    unsaid, root = [], pathlib.Path(sk.__file__).parent
    for path in (*root.glob("*.py"), *(path for room in ROOMS for path in (root / room).rglob("*.py"))):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in FACTORIES and path.name not in LIKE_TORCHS_OWN:
                # One without a name is **words.
                is_said = not {"device", None}.isdisjoint(word.arg for word in call.keywords)
                unsaid += [] if is_said else [f"{path.relative_to(root)}:{call.lineno}: {ast.unparse(call)}"]
    assert unsaid == []
