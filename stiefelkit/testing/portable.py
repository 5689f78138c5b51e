"""The laws of use: initial values, checkpoints, copies, vmap, compile, devices, and what is refused."""

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stiefelkit._torch import TorchDispatchMode
from stiefelkit.contract.param import coordinate_dtypes, load_chart_, rounded
from stiefelkit.errors import ImageError, StiefelkitError, UnfilledError
from stiefelkit.functional import nearest_frame
from stiefelkit.functional._arithmetic.devices import without_reads
from stiefelkit.functional._arithmetic.product import FullPrecision
from stiefelkit.metrics import working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import (
    Case,
    coordinate_list_of,
    draw,
    layer_of,
    require_frame,
    require_same_frame,
    saved_and_loaded,
    slack,
)
from stiefelkit.testing.suite import require, require_refused, require_within
from stiefelkit.weights import change

READS = frozenset(
    "_linalg_check_errors _linalg_eigh _linalg_eigvals _linalg_svd _local_scalar_dense _unique2 equal is_nonzero item "
    "linalg_eig linalg_lstsq linalg_matrix_exp masked_select nonzero unique_consecutive unique_dim".split()
)
"""Operators for whose result, or for whose checks, a GPU is waited for."""
_ON_THE_HOST = (Tensor.tolist, Tensor.numpy)  # methods that read a CPU's memory without an operator


def law_schemes(case: Case) -> None:
    """Every init scheme draws a frame (or says that the chart cannot), and the same one from the same generator."""
    for scheme in case.build().schemes:
        drawn = []
        for _ in range(2):
            param = case.build()
            try:
                coordinates, chart = draw(param, scheme, 5)
            except ImageError:
                require(not param.traits.onto, f"{scheme} cannot be drawn, though declared onto")
                break
            require(set(chart) == set(param.chart), f"{scheme} draws only a part of the chart")
            load_chart_(param, chart)
            drawn.append(param(*rounded(param, coordinates)))
        else:
            if param.traits.exact:
                require_frame(drawn[0], lambda w=drawn[0]: nearest_frame(w.to(working_dtype(w.dtype))))
            require(torch.equal(*drawn), f"{scheme} does not follow the generator")


def law_linear(case: Case) -> None:
    """`linear(x)` equals x @ W.mT to rounding, in full precision: products of x are the caller's to lower."""
    param, coordinates = case.random(1.0)
    for leading in ((), (5,), (2, 3)):
        x = seeds.normal((*leading, case.shape[-1]), 6, case.dtype, case.device)
        with FullPrecision(x.device):
            y, expected = param.linear(x, *coordinates), x @ param(*coordinates).mT
        off = (torch.linalg.vector_norm(y - expected) / torch.linalg.vector_norm(expected)).item()
        permitted = 8 * torch.finfo(case.dtype).eps + slack(param, coordinates)
        require_within(off, permitted, "relative to x @ W.mT off by")


def law_checkpoint(case: Case) -> None:
    """State dicts and copies bring back the same bits, name their map, and refuse another one or a plain weight."""
    layer = layer_of(case)
    w = layer.weight.detach()
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    other = layer_of(case, seed=7)
    other.load_state_dict(state)
    require(torch.equal(other.weight, w), "load_state_dict changes the weight")
    twin = copy.deepcopy(layer)
    require(torch.equal(twin.weight, w), "deepcopy changes the weight")
    change.bake(twin, "weight")
    require(torch.equal(layer.weight, w), "baking a copy changes the original")
    require(torch.equal(twin.weight, w), "baking changes the weight")
    require(torch.equal(saved_and_loaded(layer, weights_only=False).weight, w), "torch.save(module) changes the weight")
    for wrong, why in (({"weight": w}, "a plain weight"), (_renamed(state), "another map")):
        require_refused(StiefelkitError, functools.partial(layer.load_state_dict, wrong), f"loading {why}")
    if torch.complex128 not in {value.dtype for value in state.values()}:  # which safetensors do not know
        other = layer_of(case, seed=7)
        other.load_state_dict(load(save(layer.state_dict())))
        require(torch.equal(other.weight, w), "safetensors change the weight")
    with torch.device("meta"):
        elsewhere = layer_of(case)
    elsewhere.to_empty(device="cpu").load_state_dict(state)
    require(torch.equal(elsewhere.weight, w), "made on the meta device and loaded, it is another")
    empty = layer_of(case).to("meta").to_empty(device="cpu")
    require_refused(UnfilledError, lambda: empty.weight, "reading after to_empty")
    empty.load_state_dict(state)
    require(torch.equal(empty.weight, w), "loading after to_empty changes the weight")


def law_functional_call(case: Case) -> None:
    """Under vmap, stacked coordinates give what the loop gives."""
    layers = [layer_of(case, seed=seed) for seed in (8, 9)]
    named = [dict(layer.named_parameters()) for layer in layers]
    stacked = {name: torch.stack([parameters[name] for parameters in named]) for name in named[0]}
    chart = dict(layers[0].named_buffers())

    def read(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers[0], (parameters, chart), ())

    together = torch.vmap(read)(stacked)
    held = coordinate_list_of(layers[0])
    for i in range(2):
        alone = read({name: value[i] for name, value in stacked.items()})
        require_same_frame(case, held.param, held.coordinates.values(), together[i], alone, "vmap is off the loop by")


def law_compile(case: Case) -> None:
    """torch.compile(fullgraph=True) and torch.export give the weight and the gradient of eager mode."""
    layer = layer_of(case)
    g = case.normal(10)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    held = coordinate_list_of(layer)
    of = (case, held.param, tuple(held.coordinates.values()))
    w, expected = compiled(), layer()
    require_same_frame(*of, w, expected, "the compiled weight is off by")
    parameters = list(layer.parameters())
    ours, eager = (torch.autograd.grad(x, parameters, g) for x in (w, expected))
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, eager, strict=True))
    require(close, "the compiled gradient is off")
    require_same_frame(*of, torch.export.export(layer, ()).module()(), expected, "the exported weight is off by")


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    key = "parametrizations.weight._extra_state"
    described = json.loads(bytes(state[key].tolist()).decode())
    described["map"] |= {"name": "another", "class": "elsewhere:Another"}
    return state | {key: torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)}


class _RefusedOperators(TorchDispatchMode):
    """Refuses reads and tensors made on the host, of which a graph cannot capture the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[object] = []  # torch.tensor(...), lists as indices, numbers that are assigned to entries

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        require(name not in READS and not masked, f"{name} reads a value")
        found = func(*args, **(kwargs or {}))
        parts = [(each,) if isinstance(each, Tensor) else each for each in (*args, *(kwargs or {}).values(), found)]
        tensors = [t for part in parts if isinstance(part, tuple | list) for t in part if isinstance(t, Tensor)]
        is_copied = len({t.device for t in tensors}) > 1 or any(t is made for t in tensors for made in self.made)
        require(not is_copied or name == "fill_", f"{name} takes a tensor from the host")
        if name == "lift_fresh":
            self.made.append(found)
        return found


class _RefusedMethods(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        require(func not in _ON_THE_HOST, f"{func.__name__} reads a value")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusing_reads() -> Iterator[None]:
    """Context that takes on a CPU the road of other devices; raises LawBroken for reads and tensors of the host."""
    with without_reads(), _RefusedOperators(), _RefusedMethods():
        yield


def law_reads(case: Case) -> None:
    """Forward and backward read no value but on a CPU, copy nothing from there, and give what they give there."""
    param, coordinates = case.random(1.0)
    leaves = [c.detach().requires_grad_() for c in coordinates]
    g = case.normal(12)

    def run() -> tuple[Tensor, ...]:
        w = param(*leaves)
        return w.detach(), *torch.autograd.grad(w, leaves, g)

    with without_reads():
        run()  # constants are made at first use
    with refusing_reads():
        w, *gradients = run()
    expected, *expected_gradients = run()
    require_same_frame(case, param, coordinates, w, expected, "unread, the frame is off by")
    for name, ours, theirs in zip(param.coordinates, gradients, expected_gradients, strict=True):
        off = torch.dist(ours, theirs).item() / max(torch.linalg.vector_norm(g).item(), 1e-30)
        require_within(off, 1e-10 if case.is_wide else 1e-4, f"unread, the gradient of {name} is off, of dL/dW, by")


def law_meta(case: Case) -> None:
    """Forward and backward run on the meta device, where tensors have no values, without tensors of a CPU."""
    param = case.cls(case.shape, dtype=case.dtype, device="meta", **dict(case.options))
    dtypes = coordinate_dtypes(param)
    like: dict[str, Any] = {"device": "meta", "requires_grad": True}
    leaves = [torch.empty(shape, dtype=dtypes[name], **like) for name, shape in param.coordinates.items()]
    w = param(*leaves)
    with _RefusedOperators():
        torch.autograd.grad(param(*leaves), leaves, w.detach())
    require(w.is_meta and w.shape == case.shape and w.dtype == case.dtype, f"it gives {tuple(w.shape)}, {w.dtype}")
    for name, leaf, g in zip(param.coordinates, leaves, torch.autograd.grad(w, leaves, w.detach()), strict=True):
        alike = g.is_meta and g.shape == leaf.shape and g.dtype == leaf.dtype
        require(alike, f"the gradient of {name} is {tuple(g.shape)}, {g.dtype}")
