"""What may happen to a model: each event acts on a world and says whether weights may be others afterwards."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import stiefelkit as sk
from benchmarks.fuzz.layers import is_own
from benchmarks.fuzz.world import Finding, distance, equal, require, size_of
from stiefelkit.host import orthogonal_weights
from stiefelkit.metrics import working_dtype

Act = Callable[[Any, dict[str, Any], torch.Generator], str]


@dataclass(frozen=True)
class Event:
    """One kind of event.

    Attributes:
        act: does it, and returns what is expected of weights: "same", "near" or "any".
        weight: how often it is drawn.
        options: what may be drawn for it.
        may_refuse: parts of sentences by which it may be refused.
    """

    act: Act
    weight: float = 1.0
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    may_refuse: tuple[str, ...] = ()


EVENTS: dict[str, Event] = {}


def event(weight: float = 1.0, may_refuse: tuple[str, ...] = (), **options: tuple[Any, ...]) -> Callable[[Act], Act]:
    """Adds a function to the events, under its name."""

    def add(act: Act) -> Act:
        EVENTS[act.__name__.strip("_")] = Event(act, weight, options, may_refuse)
        return act

    return add


def chosen(world: Any, generator: torch.Generator) -> Any:
    """One of the orthogonal weights, or None if there is none."""
    held = world.all_weights()
    return held[int(torch.randint(len(held), (), generator=generator))] if held else None


@event(
    4.0,
    k=(1, 1, 2, 5),
    zero=("none", "zeros", "keep"),
    clip=(None, None, "torch", "ours"),
    closure=(False, False, True),
)
def step(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Steps of the optimizer, which moves what it holds as it moves plain tensors, and nothing else."""
    optimizer = world.optimizer
    for _ in range(drawn["k"]):
        world.draw_inputs(int(torch.randint(10**6, (), generator=generator)))
        if drawn["zero"] != "keep":
            optimizer.zero_grad(set_to_none=drawn["zero"] == "none")
        loss = world.loss(world.net(world.inputs()))
        if loss.requires_grad:
            loss.backward()
        if drawn["clip"]:
            clip = sk.optim.clip_grad_norm_ if drawn["clip"] == "ours" else torch.nn.utils.clip_grad_norm_
            clip(world.net.parameters(), 1.0)
        mirror = copy.deepcopy(optimizer)
        own, others = ([p for group in o.param_groups for p in group["params"]] for o in (optimizer, mirror))
        for p, other in zip(own, others, strict=True):
            other.grad = None if p.grad is None else p.grad.clone()
        held = {id(p) for p in own}
        still = {
            key: p.detach().clone()
            for key, p in world.net.named_parameters()
            if p.grad is None or id(p) not in held  # torch moves what has a gradient, trained or not
        }
        mirror.step()
        optimizer.step(*((loss.detach,) if drawn["closure"] else ()))
        moved = {id(p) for group in optimizer.param_groups if group.get("manifold") for p in group["params"]}
        for p, other in zip(own, others, strict=True):
            # of frames a copy keeps the remainder that they themselves lose when they are assigned
            near = id(p) in moved and distance(p, other) <= 500 * torch.finfo(p.dtype).eps * max(1.0, size_of(p))
            require(near or equal(p, other), f"a parameter of shape {tuple(p.shape)} is not where it is moved to")
        for key, p in world.net.named_parameters():
            require(key not in still or equal(p, still[key]), f"{key} has moved, though it does not train")
    return "any"


@event(1.0)
def schedule(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A step of the scheduler, by rates only."""
    needs = "metrics" in inspect.signature(world.scheduler.step).parameters
    world.optimizer.step()
    world.scheduler.step(*((1.0,) if needs else ()))
    return "any"


@event(2.0, to=("double", "float", "half", "bfloat16"), keeps=(False, True))
def cast(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A cast by torch's methods, which leave complex tensors alone."""
    names = {"double": torch.float64, "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
    getattr(world.net, drawn["to"])()
    world.real = names[drawn["to"]]
    for i, layer in enumerate(world.layers):
        if not layer["complex"]:
            world.reals[i] = world.real
        elif is_own(layer) and not world.is_plain[i]:
            world.reals[i] = torch.float64 if world.real == torch.float64 else torch.float32
    world.renew(keeps=drawn["keeps"])
    return "near"


@event(0.7, how=("cpu", "to", "channels", "contiguous"))
def move(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A move to where it is."""
    net = world.net
    if drawn["how"] == "channels":
        net.to(memory_format=torch.channels_last)
    elif drawn["how"] == "contiguous":
        net._apply(lambda t: t.clone())
    else:
        net.cpu() if drawn["how"] == "cpu" else net.to("cpu")
    return "same"


@event(1.5, goes_on=(True, False))
def deepcopy(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A copy of model, optimizer and scheduler; the one that is left alone is trained, and the other does not move."""
    net, optimizer, scheduler = copy.deepcopy((world.net, world.optimizer, world.scheduler))
    held = {id(p) for p in net.parameters()}
    members = [p for group in optimizer.param_groups for p in group["params"]]
    if drawn["goes_on"]:
        require(all(id(p) in held for p in members), "the copied optimizer holds parameters of another model")
        net, world.net, world.optimizer, world.scheduler = world.net, net, optimizer, scheduler
    with torch.no_grad():
        for weight in orthogonal_weights(net):
            sk.reset_(net, weight.qualified, generator=generator)
    return "same"


@event(1.0, how=("pickle", "save"))
def pickled(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Pickles model and optimizer together."""
    both = (world.net, world.optimizer)
    if drawn["how"] == "pickle":
        both = pickle.loads(pickle.dumps(both))
    else:
        stream = io.BytesIO()
        torch.save(both, stream)
        stream.seek(0)
        both = torch.load(stream, weights_only=False)
    world.net, world.optimizer = both
    world.scheduler = world.make_scheduler()
    return "same"


@event(
    2.0,
    may_refuse=("on the meta device needs an init scheme",),
    how=("plain", "file", "safetensors", "assign", "meta", "meta_assign"),
    keeps=(True, False),
)
def loaded(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """The state dict, loaded into another model."""
    state, how = world.net.state_dict(), drawn["how"]
    if how == "file":
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        state = torch.load(stream, weights_only=True)
    elif how == "safetensors" and torch.complex128 not in {t.dtype for t in state.values()}:
        state = load_safetensors(save_safetensors({key: t.contiguous() for key, t in state.items()}))
    with torch.device("meta" if how.startswith("meta") else "cpu"):
        net = world.fresh(drawn["seed"])
    if how == "meta":
        net.to_empty(device="cpu")
    net.load_state_dict({k: t.clone() for k, t in state.items()}, assign=how in ("assign", "meta_assign"))
    for key, p in net.named_parameters():
        p.requires_grad_(world.net.get_parameter(key).requires_grad)
    world.renew(net, keeps=drawn["keeps"])
    return "same"


@event(0.7)
def emptied(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """The model itself through the meta device, and loaded again."""
    state = {key: t.clone() for key, t in world.net.state_dict().items()}
    world.net.to("meta").to_empty(device="cpu")
    world.net.load_state_dict(state)
    world.renew(keeps=True)
    return "same"


@event(0.7)
def optimizer_loaded(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """The optimizer's state dict through a file."""
    stream = io.BytesIO()
    torch.save(world.optimizer.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    world.optimizer = world.make_optimizer(world.net)
    world.optimizer.load_state_dict(state)
    world.scheduler = world.make_scheduler()
    return "same"


@event(1.5, how=("context", "group", "ungroup"))
def grouped(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Weights that are mapped together: the same up to rounding, gradients too."""
    if drawn["how"] == "group":
        sk.group_(world.net)
    elif drawn["how"] == "ungroup":
        sk.ungroup_(world.net)
    else:
        inputs = world.inputs()
        with sk.grouped(world.net):
            there = world.evaluate(world.net, inputs)
        agree(world, "grouped", there, world.evaluate(world.net, inputs))
    return "same"


def agree(world: Any, what: str, there: Any, here: Any) -> None:
    """Requires outputs and gradients of two roads to be the same up to rounding."""
    for one, other in zip(there[:2], here[:2], strict=True):
        world.compare(what, one, other)
    for key, g in here[2].items():
        world.compare(f"{what}: gradient of {key}", [there[2].get(key)], [g])


@event(1.0, what=("layer", "weight", "all"), trains=(False, False, True))
def freeze(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Parameters that train no more, or again."""
    i = int(torch.randint(len(world.layers), (), generator=generator))
    weight, what = chosen(world, generator), drawn["what"]
    if what == "weight" and weight is not None:
        weight.coordinate_list.requires_grad_(drawn["trains"])
    else:
        (world.net if what == "all" else world.net.layers[i]).requires_grad_(drawn["trains"])
    return "same"


@event(1.5, how=("attribute", "function", "nonsense", "other"), may_refuse=("needs", "has no right inverse"))
def assign(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A frame that the map may have, or nonsense, which is refused."""
    weight = chosen(world, generator)
    if weight is None:
        return "same"
    own = getattr(weight.host, weight.name).detach()
    if drawn["how"] == "nonsense":
        value = torch.randn(own.shape, dtype=own.dtype, generator=generator) * 3
        sk.assign_(world.net, weight.qualified, value)
        one_entry = own.numel() == 1 or min(own.shape[-2:]) == 1 or "gain" in weight.coordinate_list.param.coordinates
        require(one_entry, f"{weight.qualified} takes a matrix that is no frame")
        return "any"
    other = world.fresh(drawn["seed"])
    value = dict((w.qualified, getattr(w.host, w.name).detach()) for w in orthogonal_weights(other))[weight.qualified]
    if drawn["how"] == "attribute":
        setattr(weight.host, weight.name, value)
    elif drawn["how"] == "other":
        setattr(weight.host, weight.name, nn.Parameter(value.double() if not value.is_complex() else value))
    else:
        sk.assign_(world.net, weight.qualified, value)
    bound = weight.coordinate_list.param.return_bound + 100 * torch.finfo(value.dtype).eps * value.numel() ** 0.5
    off = distance(getattr(weight.host, weight.name), value)
    bound *= max(1.0, value.abs().max().item())
    require(off <= bound, f"{weight.qualified} is {off:.3g} from what was assigned, more than {bound:.3g}")
    return "any"


@event(1.0, scheme=(None, "haar", "identity", "henaff"), may_refuse=("has no init", "needs"))
def reset(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A weight drawn anew."""
    weight = chosen(world, generator)
    if weight is not None:
        sk.reset_(world.net, weight.qualified, drawn["scheme"], generator)
    return "any"


@event(0.7, may_refuse=('needs a weight with the map "rebased"',), optimizer=(True, False))
def rebase(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A base that follows."""
    weight = chosen(world, generator)
    if weight is not None:
        sk.rebase_(world.net, weight.qualified, world.optimizer if drawn["optimizer"] else None)
    return "near"


@event(0.5, how=("one", "all", "keep", "original"), may_refuse=("Cannot leave unparametrized",))
def bake(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Plain weights in the place of orthogonal ones."""
    weight, how = chosen(world, generator), drawn["how"]
    world.is_baked = True
    if how == "all":
        sk.bake(world.net)
        world.is_plain = [True] * len(world.layers)
    elif weight is not None:
        if how == "one":
            sk.bake(world.net, weight.qualified)
        else:
            parametrize.remove_parametrizations(weight.host, weight.name, leave_parametrized=how == "keep")
        world.is_plain[int(weight.qualified.split(".")[1])] = True
    world.renew()
    return "same"


@event(0.7, map=("cayley", "stiefel", "householder", "matrix_exp", "givens", "rebased"))
def orthogonal_again(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A weight baked and made orthogonal by another map, whose frame it stays where that can have it."""
    weight = chosen(world, generator)
    if weight is None:
        return "same"
    i = int(weight.qualified.split(".")[1])
    given = ("blocks", "dim", "view", "gain")
    options = {key: v for key, v in world.layers[i]["options"].items() if key in given}
    if world.layers[i]["map"] == "block_diagonal" and not world.layers[i]["kind"].endswith("_cell"):
        options.pop("blocks", None)
    if drawn["map"] == "matrix_exp":
        options["init"] = "haar"
    drawn_anew = world.layers[i]["map"] == "margin" or "init" in options
    sk.bake(world.net, weight.qualified)
    trains = getattr(weight.host, weight.name).requires_grad
    sk.orthogonal(world.net, weight.qualified, drawn["map"], **options)
    weight.host.requires_grad_(trains)
    layers = [*world.layers]
    layers[i] = {**layers[i], "map": drawn["map"], "options": options}
    world.layers, world.is_baked = layers, True
    world.renew()
    return "any" if drawn_anew else "near"


@event(1.0, how=("ours", "torch", "lerp", "replaced"), look=("read", "save", "copy"))
def average(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """An average of this model and one near it, which goes on in its place."""
    other = copy.deepcopy(world.net)
    with torch.no_grad():
        for p in other.parameters():
            if not any(p is c for w in orthogonal_weights(other) for c in frames_of(w)):
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator), alpha=0.01)
    if drawn["how"] in ("ours", "torch"):
        multi = sk.optim.multi_avg_fn(0.9) if drawn["how"] == "ours" else get_ema_multi_avg_fn(0.9)
        averaged = AveragedModel(world.net, multi_avg_fn=multi, use_buffers=True)
        averaged.update_parameters(world.net)
        averaged.update_parameters(other)
        net = averaged.module
    else:
        net = copy.deepcopy(world.net)
        for a, c in zip(net.parameters(), other.parameters(), strict=True):
            if drawn["how"] == "lerp":
                a.data.lerp_(c.data, 0.1)
            else:
                a.data = 0.9 * a.data + 0.1 * c.data
    if drawn["look"] == "save":
        net.state_dict()
    elif drawn["look"] == "copy":
        net = copy.deepcopy(net)
    else:
        with torch.no_grad():
            net(world.inputs())
    world.renew(net)
    return "any"


def frames_of(weight: Any) -> list[Tensor]:
    """The coordinates of a weight that must stay frames."""
    one = weight.coordinate_list
    return [c for name, c in one.coordinates.items() if name in one.param.manifolds]


@event(1.0, mode=("no_grad", "inference", "eval", "train", "cached", "autocast", "checkpoint", "threads"))
def read(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Outputs in other modes are those of this one."""
    net, inputs, mode = world.net, world.inputs(), drawn["mode"]
    if mode in ("eval", "train"):
        net.train(mode == "train")
        return "same"
    here = world.evaluate(net, inputs)
    if mode == "cached":
        with parametrize.cached():
            agree(world, mode, world.evaluate(net, inputs), here)
    elif mode == "checkpoint":
        through = lambda x: checkpoint(net, x, use_reentrant=False)  # noqa: E731
        agree(world, mode, world.evaluate(net, inputs, through), here)
    elif mode == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(inputs)
    else:
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            world.compare(mode, net(inputs), here[0])
    return "same"


@event(0.3, backend=("eager", "aot_eager"))
def compiled(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A compiled model gives what it gives uncompiled."""
    inputs = world.inputs()
    torch._dynamo.reset()
    fast = torch.compile(world.net, backend=drawn["backend"])
    agree(world, "compiled", world.evaluate(world.net, inputs, fast), world.evaluate(world.net, inputs))
    return "same"


@event(0.3, how=("export", "fx"))
def traced(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A traced layer gives what it gives untraced."""
    i = int(torch.randint(len(world.layers), (), generator=generator))
    kind, layer, x = world.net.kinds[i], world.net.layers[i], world.inputs()[i]
    if kind in ("attention", "rnn", "own_rnn", "bag") or kind.endswith(("_cell", "d1d", "d2d")):
        return "same"
    graph: Any = torch.export.export(layer, x).module() if drawn["how"] == "export" else torch.fx.symbolic_trace(layer)
    world.compare(drawn["how"], [graph(*x).detach()], [layer(*x).detach()])
    return "same"


@event(1.0, may_refuse=("Batching rule not implemented",), how=("call", "vmap", "grad"))
def functional(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """The model as a function of its parameters."""
    net, inputs, how = world.net, world.inputs(), drawn["how"]
    values = {key: p.detach().clone() for key, p in net.named_parameters()}
    buffers = {key: b.clone() for key, b in net.named_buffers()}
    here = world.evaluate(net, inputs)
    call = lambda p: torch.func.functional_call(net, (p, buffers), (inputs,))  # noqa: E731
    if how == "call":
        world.compare(how, [y.detach() for y in call(values)], here[0])
    elif how == "grad":
        grads = torch.func.grad(lambda p: world.loss(call(p)))(values)
        for key, g in here[2].items():
            require(key in grads, f"{key} has no gradient under torch.func")
            expected = torch.zeros_like(grads[key]) if g is None else g
            world.compare(f"torch.func: gradient of {key}", [grads[key]], [expected])
    else:
        stacked = {key: torch.stack([v, v]) for key, v in values.items()}
        for y, expected in zip(torch.vmap(call)(stacked), here[0], strict=True):
            world.compare("vmap", [y[1].detach()], [expected])
    return "same"


@event(0.5)
def shared_memory(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Memory that processes share."""
    world.net.share_memory()
    return "same"


@event(0.7)
def hooked(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Hooks on modules and coordinates see what they should, and change nothing."""
    seen: list[int] = []
    leaves = [p for p in world.net.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(lambda p: seen.append(id(p))) for p in leaves]
    handles += [layer.register_full_backward_hook(lambda *_: None) for layer in world.net.layers]
    handles += [layer.register_forward_hook(lambda *_: None) for layer in world.net.layers]
    loss = world.loss(world.net(world.inputs()))
    if loss.requires_grad:
        loss.backward()
    require(len(seen) == len(set(seen)), "a gradient is accumulated twice")
    for handle in handles:
        handle.remove()
    world.optimizer.zero_grad()
    return "same"


@event(0.7)
def curvature(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Second derivatives of a weight, along its own gradient, are those of the map in float64."""
    weight = chosen(world, generator)
    if weight is None or not weight.coordinate_list.param.traits.twice_differentiable:
        return "same"
    one = weight.coordinate_list
    exact = copy.deepcopy(one.param).to(working_dtype(one.param.dtype))
    g = torch.randn(getattr(weight.host, weight.name).shape, dtype=working_dtype(one.param.dtype), generator=generator)
    found = []
    for param in (one.param, exact):
        held = [c.detach().to(working_dtype(c.dtype) if param is exact else c.dtype) for c in one.coordinates.values()]
        w = param(*[c.requires_grad_() for c in held])
        first = (w.to(g.dtype) * g.conj()).real.square().sum()
        grads = torch.autograd.grad(first, held, create_graph=True)
        total = torch.stack([d.abs().to(torch.float64).square().sum() for d in grads]).sum()
        found.append(torch.autograd.grad(total, held, allow_unused=True) if total.requires_grad else [])
    if world.real.itemsize > 2:
        world.compare("a second derivative", *found)
    return "same"


@event(0.7, may_refuse=("needs",), what=("nan", "plain", "other_map", "shape", "missing"))
def bad_state(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A state dict that does not fit is refused as a whole."""
    weight, what = chosen(world, generator), drawn["what"]
    if weight is None:
        return "same"
    state = {key: t.clone() for key, t in world.net.state_dict().items()}
    path = weight.qualified.rpartition(".")[0]
    prefix = f"{path}.parametrizations.{weight.name}."
    first = next(key for key in state if key.startswith(f"{prefix}original"))
    if what == "nan" and state[first].numel():
        state[first] = torch.full_like(state[first], float("nan"))
    elif what == "plain":
        state = {key: t for key, t in state.items() if not key.startswith(prefix)}
        state[weight.qualified] = getattr(weight.host, weight.name).detach()
    elif what == "other_map":
        text = bytes(state[f"{prefix}_extra_state"].tolist()).replace(b'"map"', b'"mop"')
        state[f"{prefix}_extra_state"] = torch.tensor(list(text), dtype=torch.uint8)
    elif what == "shape":
        state[first] = torch.zeros(*state[first].shape, 2)
    elif what == "missing":
        del state[first]
    else:
        return "same"
    for key in state:
        if not key.startswith(prefix) and state[key].is_floating_point():
            state[key] = state[key] + 1  # what else is there must not be written either
    sk.check_state_dict(world.net, state)
    raise Finding(f"a state dict with {what} is loaded without a word")


@event(0.5, may_refuse=("needs finite gradients",))
def bad_gradient(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """A step with NaN, which an optimizer of frames refuses as a whole."""
    moved = [p for group in world.optimizer.param_groups if group.get("manifold") for p in group["params"]]
    world.optimizer.zero_grad()
    if not moved:
        return "same"
    for p in world.net.parameters():
        p.grad = torch.ones_like(p)
    moved[-1].grad.mul_(float("nan"))
    try:
        world.optimizer.step()
    finally:
        world.optimizer.zero_grad()
    raise Finding("a step with NaN is made without a word")


@event(0.7)
def copied(world: Any, drawn: dict[str, Any], generator: torch.Generator) -> str:
    """Parameters and buffers, copied one by one through .data into another model, as target networks are."""
    net = world.fresh(drawn["seed"])
    held = {**dict(world.net.named_parameters()), **dict(world.net.named_buffers())}
    for key, a in [*net.named_parameters(), *net.named_buffers()]:
        a.data.copy_(held[key].data)
        a.requires_grad_(held[key].requires_grad)
    world.renew(net)
    return "same"
