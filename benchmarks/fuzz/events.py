"""What may happen to a model: each event acts on a world, and says whether weights may be others afterwards.

It returns "same" for the same bits, "near" for the same up to rounding, "any" for others.
"""

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import stiefelkit as sk
from benchmarks.fuzz.layers import is_own
from benchmarks.fuzz.steps import Retaken, exact
from benchmarks.fuzz.world import Ended, Finding, World, distance, require
from stiefelkit.errors import ImageError
from stiefelkit.metrics import working_dtype
from stiefelkit.testing.optimizer_cases import equal
from stiefelkit.weights.find import orthogonal_weights

DTYPES = {"double": torch.float64, "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
LARGE = "so large that"
"""What a step may be refused for: a gradient that overflows."""


@dataclass(frozen=True)
class Event:
    """One kind of event: what does it, how often it is drawn, with which options, and how it may be refused."""

    act: Callable[..., str]
    weight: float
    may_refuse: tuple[str, ...]
    options: dict[str, tuple[Any, ...]]


EVENTS: dict[str, Event] = {}


def event(weight: float = 1.0, *may_refuse: str, **options: tuple[Any, ...]) -> Any:
    """Adds a function to the events, under its name."""

    def add(act: Callable[..., str]) -> Callable[..., str]:
        EVENTS[act.__name__] = Event(act, weight, may_refuse, options)
        return act

    return add


def through_file(value: Any, weights_only: bool = True) -> Any:
    """Saves and loads."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)


@event(4.0, LARGE, k=(1, 1, 2, 5), zero=("none", "zeros", "keep"), clip=("", "", "torch", "ours"), rates=(False, True))
def step(world: World, k: int, zero: str, clip: str, rates: bool) -> str:
    """Steps of the optimizer, or of the scheduler too: what it holds moves as in float64, and nothing else does."""
    optimizer: Any = world.optimizer
    for _ in range(k):
        world.draw_inputs(world.number(10**6))
        if zero != "keep":
            optimizer.zero_grad(set_to_none=zero == "none")
        loss = world.loss(world.net(world.inputs()))
        if loss.requires_grad:
            loss.backward()
        if clip:
            (sk.optim if clip == "ours" else nn.utils).clip_grad_norm_(world.net.parameters(), 1.0)
        if not all(p.grad is None or torch.isfinite(p.grad).all() for p in world.net.parameters()):
            raise Ended
        held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        # torch moves what has a gradient, trained or not
        still = {key: p.detach().clone() for key, p in world.net.named_parameters() if id(p) not in held}
        retaken = Retaken(optimizer, world.generator)
        optimizer.step()
        for what, off, bound in retaken.off():
            world.checks["steps beside float64"] += 1
            require(off <= bound, f"{what} is off by {off:.3g}, more than {bound:.3g}")
        for key, p in world.net.named_parameters():
            require(key not in still or equal(p, still[key]), f"{key} has moved, though it does not train")
        if rates:
            world.scheduler.step(*((1.0,) if "metrics" in inspect.signature(world.scheduler.step).parameters else ()))
    return "any"


@event(0.5, "needs finite gradients")
def bad_gradient(world: World) -> str:
    """A step with NaN, which an optimizer of frames refuses as a whole."""
    world.optimizer.zero_grad()
    frames = [p for group in world.optimizer.param_groups if group.get("manifold") for p in group["params"]]
    if not frames:
        return "same"
    for p in world.net.parameters():
        p.grad = torch.ones_like(p)
    frames[-1].grad.mul_(float("nan"))
    try:
        world.optimizer.step()
    finally:
        world.optimizer.zero_grad()
    raise Finding("a step with NaN is made without a word")


@event(2.0, to=tuple(DTYPES), keeps=(False, True))
def cast(world: World, to: str, keeps: bool) -> str:
    """A cast by torch's methods, which leave complex tensors alone; our recurrences take theirs along."""
    getattr(world.net, to)()
    world.real = DTYPES[to]
    for i, layer in enumerate(world.layers):
        if not layer["complex"]:
            world.reals[i] = world.real
        elif is_own(layer) and not world.is_plain[i]:
            world.reals[i] = torch.float64 if to == "double" else torch.float32
    world.renew(keeps=keeps)
    return "near"


MOVES: dict[str, Callable[[Any], Any]] = {
    "cpu": lambda net: net.cpu(),
    "to": lambda net: net.to("cpu"),
    "channels": lambda net: net.to(memory_format=torch.channels_last),
    "clone": lambda net: net._apply(torch.clone),
    "share": lambda net: net.share_memory(),
    "eval": lambda net: net.eval(),
    "train": lambda net: net.train(),
    "group": lambda net: sk.group_(net),
    "ungroup": lambda net: sk.ungroup_(net),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "original": copy.deepcopy,
    "pickle": lambda all_: pickle.loads(pickle.dumps(all_)),
    "save": lambda all_: through_file(all_, weights_only=False),
}


@event(1.5, how=tuple(MOVES))
def move(world: World, how: str) -> str:
    """A move to where it is, another mode, or weights that are mapped together."""
    MOVES[how](world.net)
    return "same"


@event(2.0, how=tuple(COPIES))
def copied(world: World, how: str) -> str:
    """A copy of model, optimizer and scheduler; the one that does not go on is drawn anew."""
    held = (world.net, world.optimizer, world.scheduler)
    others = COPIES[how](held)
    if how != "original":
        world.net, world.optimizer, world.scheduler = others
        others = held
    for weight in orthogonal_weights(others[0]):
        sk.reset_(others[0], weight.qualified, generator=world.generator)
    return "same"


@event(
    2.5,
    "on the meta device needs an init scheme",
    how=("plain", "file", "safetensors", "assign", "meta", "meta_assign", "itself", "data"),
    keeps=(True, False),
)
def loaded(world: World, how: str, keeps: bool) -> str:
    """The state dict, loaded into another model, or this one emptied; or all of it copied, as target networks are."""
    state = {key: t.clone(memory_format=torch.contiguous_format) for key, t in world.net.state_dict().items()}
    if how == "file":
        state = through_file(state)
    elif how == "safetensors" and torch.complex128 not in {t.dtype for t in state.values()}:
        state = load_safetensors(save_safetensors(state))
    with torch.device("meta" if how.startswith("meta") else "cpu"):
        net = world.net if how == "itself" else world.fresh()
    if how in ("meta", "itself"):
        net.to("meta").to_empty(device="cpu").zero_grad()  # to_empty leaves gradients empty too, whose values are any
    every: dict[str, Any] = {"remove_duplicate": False}
    held = {**dict(world.net.named_parameters(**every)), **dict(world.net.named_buffers(**every))}
    if how == "data":
        for key, a in [*net.named_parameters(), *net.named_buffers()]:
            a.data.copy_(held[key].data)
    else:
        net.load_state_dict(state, assign=how.endswith("assign"))
    for key, p in net.named_parameters():
        p.requires_grad_(held[key].requires_grad)
    world.renew(net, keeps=keeps)
    return "same"


@event(0.7)
def optimizer_loaded(world: World) -> str:
    """The optimizer's state dict through a file."""
    state = through_file(world.optimizer.state_dict())
    world.optimizer = world.make_optimizer(world.net)
    world.optimizer.load_state_dict(state)
    world.scheduler = world.make_scheduler()
    return "same"


@event(1.0, what=("layer", "weight", "all"), trains=(False, False, True))
def freeze(world: World, what: str, trains: bool) -> str:
    """Parameters that train no more, or again."""
    weight = world.weight()
    i = world.number(len(world.layers))
    one = weight.coordinate_list if weight is not None and what == "weight" else world.net.layers[i]
    (world.net if what == "all" else one).requires_grad_(trains)
    return "same"


@event(1.5, "needs", "has no right inverse", how=("attribute", "function", "parameter", "nonsense"))
def assign(world: World, how: str) -> str:
    """A frame that the map may have, or nonsense, which is refused."""
    weight = world.weight()
    if weight is None:
        return "same"
    name, param = weight.qualified, weight.coordinate_list.param
    if how == "nonsense":
        own = getattr(weight.host, weight.name)
        sk.assign_(world.net, name, 10 + torch.randn(own.shape, dtype=own.dtype, generator=world.generator))
        has_gain = any(
            key.rpartition(".")[2] == "gain" for key in param.coordinates
        )  # with which one column is a frame
        require(has_gain, f"{name} takes a matrix that is no frame")
        return "any"
    value = world.fresh().weights()[name].detach()
    try:
        if how == "function":
            sk.assign_(world.net, name, value)
        else:
            given = value if how == "attribute" else nn.Parameter(value.to(working_dtype(value.dtype)))
            setattr(weight.host, weight.name, given)
    except ImageError:
        require(not (param.traits.onto and param.traits.invertible), f"{name} does not take a frame of its own image")
        raise
    bound = param.return_bound + 100 * torch.finfo(value.dtype).eps * value.numel() ** 0.5
    bound, off = bound * max(1.0, value.abs().max().item()), distance(getattr(weight.host, weight.name), value)
    require(off <= bound, f"{name} is {off:.3g} from what was assigned, more than {bound:.3g}")
    return "any"


@event(1.0, "has no init", "needs", scheme=(None, "haar", "identity", "henaff"))
def reset(world: World, scheme: str | None) -> str:
    """A weight drawn anew."""
    weight = world.weight()
    if weight is not None:
        sk.reset_(world.net, weight.qualified, scheme, world.generator)
    return "any"


@event(0.7, 'needs a weight with the map "rebased"', optimizer=(True, False))
def rebase(world: World, optimizer: bool) -> str:
    """A base that follows."""
    weight = world.weight()
    if weight is not None:
        sk.rebase_(world.net, weight.qualified, world.optimizer if optimizer else None)
    return "near"


@event(0.5, "Cannot leave unparametrized", how=("one", "all", "keep", "original"))
def bake(world: World, how: str) -> str:
    """Plain weights in the place of orthogonal ones."""
    weight = world.weight()
    if how == "all":
        sk.bake(world.net)
    elif weight is not None:
        if how == "one":
            sk.bake(world.net, weight.qualified)
        elif getattr(weight.host, weight.name).requires_grad:  # torch would leave a buffer
            parametrize.remove_parametrizations(weight.host, weight.name, leave_parametrized=how == "keep")
        else:
            return "same"
    world.baked()
    return "same"


@event(0.7, to=("cayley", "stiefel", "householder", "matrix_exp", "givens", "rebased"))
def orthogonal_again(world: World, to: str) -> str:
    """A weight baked and made orthogonal by another map, whose frame it stays where that can have it."""
    weight = world.weight()
    if weight is None:
        return "same"
    layer = world.layers[int(weight.qualified.split(".")[1])]
    options = {key: v for key, v in layer["options"].items() if key in ("blocks", "dim", "view", "gain")}
    if layer["map"] == "block_diagonal":
        options.pop("blocks", None)
    options |= {"init": "haar"} if to == "matrix_exp" else {}
    sk.bake(world.net, weight.qualified)
    trains = getattr(weight.host, weight.name).requires_grad
    sk.orthogonal(world.net, weight.qualified, to, **options)
    world.weight_named(weight.qualified).coordinate_list.requires_grad_(trains)
    world.layers = [{**layer, "map": to, "options": options} if one is layer else one for one in world.layers]
    world.baked()
    return "any" if layer["map"] == "margin" or "init" in options else "near"


@event(1.0, how=("ours", "torch", "lerp", "replaced"), look=("read", "save", "copy"))
def average(world: World, how: str, look: str) -> str:
    """An average of this model and one near it, which goes on in its place."""
    other = copy.deepcopy(world.net)
    means: list[tuple[str, Any]] = []
    with torch.no_grad():
        for weight in orthogonal_weights(other):
            own = world.weight_named(weight.qualified).coordinate_list.coordinates
            for name, c in weight.coordinate_list.coordinates.items():
                near = c + 0.01 * torch.randn(c.shape, dtype=c.dtype, generator=world.generator)
                is_frame = name in weight.coordinate_list.param.manifolds
                c.copy_(sk.functional.nearest_frame(near) if is_frame else near)
                if not is_frame:
                    means.append((weight.qualified, (name, 0.9 * exact(own[name]) + 0.1 * exact(c))))
    if how in ("ours", "torch"):
        multi = sk.optim.multi_avg_fn(0.9) if how == "ours" else get_ema_multi_avg_fn(0.9)
        averaged = AveragedModel(world.net, multi_avg_fn=multi, use_buffers=True)
        averaged.update_parameters(world.net)
        averaged.update_parameters(other)
        net: Any = averaged.module
    else:
        net, world.is_averaged = copy.deepcopy(world.net), True
        for a, c in zip(net.parameters(), other.parameters(), strict=True):
            if how == "lerp":
                a.data.lerp_(c.data, 0.1)
            else:
                a.data = 0.9 * a.data + 0.1 * c.data
    if look == "save":
        net.state_dict()
    elif look == "copy":
        net = copy.deepcopy(net)
    else:
        with torch.no_grad():
            net(world.inputs())
    world.renew(net)
    for qualified, (name, mean) in means if not world.is_tied else ():
        c = world.weight_named(qualified).coordinate_list.coordinates[name]
        bound = 8 * torch.finfo(c.dtype).eps * max(1.0, mean.norm().item())
        world.checks["averages of coordinates"] += 1
        require(distance(c, mean) <= bound, f"the mean of {name} of {qualified} is off by {distance(c, mean):.3g}")
    return "any"


ROADS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "grouped": sk.grouped,
    "cached": lambda net: parametrize.cached(),
    "hooks": lambda net: _hooks(net),
}


@contextlib.contextmanager
def _hooks(net: Any) -> Any:
    handles = [layer.register_full_backward_hook(lambda *_: None) for layer in net.layers]
    yield
    for handle in handles:
        handle.remove()


@event(2.0, how=("no_grad", "inference", "autocast", "checkpoint", *ROADS))
def read(world: World, how: str) -> str:
    """Outputs and gradients by other roads are those of this one."""
    net, inputs = world.net, world.inputs()
    if how in ROADS:
        with ROADS[how](net):
            here = world.evaluate(net, inputs)
        world.agree(how, lambda x: _within(ROADS[how](net), net, x))
        world.compare(how, here[0], world.evaluate(net, inputs)[0])
    elif how == "checkpoint":
        world.agree(how, lambda x: checkpoint(net, x, use_reentrant=False))
    elif how == "autocast":
        if world.real != torch.float16:  # torch.stack mixes no halves
            with torch.autocast("cpu", dtype=torch.bfloat16):
                require(all(torch.isfinite(y).all() for y in net(inputs)), "autocast leaves the numbers")
    else:
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            outputs = net(inputs)
        world.compare(how, outputs, world.evaluate(net, inputs)[0])
    return "same"


def _within(context: Any, net: Any, inputs: Any) -> Any:
    with context:
        return net(inputs)


@event(0.2, how=("eager", "aot_eager", "export", "fx"))
def traced(world: World, how: str) -> str:
    """A compiled model, or a traced layer, gives what it gives otherwise."""
    net = world.net
    if how in ("eager", "aot_eager"):
        torch._dynamo.reset()
        world.agree("compiled", torch.compile(net, backend=how))
    for kind, layer, x in zip(net.kinds, net.layers, world.inputs(), strict=True) if how in ("export", "fx") else ():
        if kind in ("linear", "own_linear", "embedding", "conv1d", "conv2d", "bare", "bilinear"):
            graph: Any = torch.export.export(layer, x).module() if how == "export" else torch.fx.symbolic_trace(layer)
            world.compare(how, [graph(*x).detach()], [layer(*x).detach()])
    return "same"


@event(1.0, "Batching rule not implemented", how=("call", "vmap", "grad"))
def functional(world: World, how: str) -> str:
    """The model as a function of its parameters."""
    net, inputs = world.net, world.inputs()
    values = {key: p.detach().clone() for key, p in net.named_parameters()}
    buffers = {key: b.clone() for key, b in net.named_buffers()}
    outputs, _, grads = world.evaluate(net, inputs)
    call = lambda parameters: functional_call(net, (parameters, buffers), (inputs,))  # noqa: E731
    if how == "grad":
        found = grad(lambda parameters: world.loss(call(parameters)))(values)
        for key, g in grads.items():
            expected = torch.zeros_like(values[key]) if g is None else g
            world.compare(f"torch.func: gradient of {key}", [found[key]], [expected])
    else:
        stacked = {key: torch.stack([v, v]) for key, v in values.items()}
        world.compare(how, call(values) if how == "call" else [y[1] for y in torch.vmap(call)(stacked)], outputs)
    return "same"


@event(0.7, "needs", what=("nan", "shape", "missing"))
def bad_state(world: World, what: str) -> str:
    """A state dict that does not fit is refused as a whole."""
    weight = world.weight()
    if weight is None:
        return "same"
    state = {key: t.clone() for key, t in world.net.state_dict().items()}
    prefix = f"{weight.qualified.rpartition('.')[0]}.parametrizations.{weight.name}."
    first = next(key for key in state if key.startswith(f"{prefix}original"))
    if not state[first].numel() or (world.is_tied and what == "missing"):  # which may have been saved once
        return "same"
    if what == "nan":
        state[first].fill_(float("nan"))
    elif what == "shape":
        state[first] = torch.zeros(*state[first].shape, 2)
    else:
        del state[first]
    sk.check_state_dict(world.net, state)
    raise Finding(f"a state dict with {what} is loaded without a word")
