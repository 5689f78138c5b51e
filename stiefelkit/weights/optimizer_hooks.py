"""Hooks around each step of a torch optimizer, which refuse to break frames and warn of wrong parameters.

A coordinate list announces itself once, and so does who has a frame without a module. Nothing is stored in the tensors,
which FSDP2 and casts replace: which parameter is a frame is looked up when it matters, among the coordinate lists and
the tensors that are still alive. Only geoopt's parameters say themselves where they live. The hooks are unregistered
with the last weight that needs them.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stiefelkit._torch import write_count
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.errors import OptimizerError, enumerated, warn_caller

MANIFOLDS = ("stiefel:canonical", "stiefel:euclidean")  # the manifolds that optimizers know, each with its metric


class WatchedWeight(Protocol):
    """An orthogonal weight as optimizers see it: a `CoordinateList`."""

    weight: str

    @property
    def param(self) -> OrthogonalParam:
        """The map."""
        ...

    @property
    def coordinates(self) -> dict[str, nn.Parameter]:
        """Name to parameter of each coordinate."""
        ...


class WatchedLayer(Protocol):
    """A layer with parameters of its own that are coordinates, as optimizers see it: `CoordinateParameters`."""

    def coordinate_keys(self) -> dict[str, str]:
        """Returns name of parameter, "angle_l0", to that of its coordinate, "angle"."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns a parameter by its name."""
        ...


class Frame(NamedTuple):
    """The owner of a parameter that is a frame; the coordinate list is None for one without a module."""

    coordinate_list: WatchedWeight | None
    name: str
    manifold: str

    @property
    def title(self) -> str:
        """The name in messages, "the frame of Linear.weight"."""
        watched = self.coordinate_list
        return "a frame without a module" if watched is None else f"the frame of {watched.weight}"


class _Replaced(NamedTuple):
    """Arguments of `mark_replaced`, and whether the parameter had a gradient at that time."""

    weight: str
    event: str
    replacement: "weakref.ref[WatchedWeight | nn.Parameter]"
    had_gradient: bool


T = TypeVar("T")
Entry = TypeVar("Entry")
_Alive = dict[int, tuple[weakref.ref[T], Entry]]
_watched: _Alive[WatchedWeight, tuple[bool, dict[str, str]]] = {}
"""By id: the coordinate lists alive, whether they hold frames, and the manifolds of coordinates."""
_alone: _Alive[Tensor, str] = {}  # the frames alive that no coordinate list holds, and their manifolds
_layers: _Alive[WatchedLayer, str] = {}  # the layers alive that have coordinates of their own, and their names
_replaced: _Alive[Tensor, _Replaced] = {}
_manifolds: list[type] = []  # classes of manifolds; the tensors that say they are on one are watched too
_hooks: list[RemovableHandle] = []
_running: list[torch.optim.Optimizer] = []
"""The optimizers whose step waits for a hook here: torch iterates over its hooks then, and none may be removed."""
_looked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[bool, tuple[int, int]]] = weakref.WeakKeyDictionary()
"""Of each optimizer checked since the last weight came or went: whether it moves frames, parameters, suspect groups."""
_moved: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = weakref.WeakKeyDictionary()
"""The write count of each frame after its optimizer's last step, by id."""


def _remember(table: _Alive[T, Entry], thing: T, entry: Entry) -> None:
    _looked.clear()
    table[id(thing)] = weakref.ref(thing, functools.partial(_forget, table, id(thing))), entry
    if not _hooks:
        _install()


def _forget(table: _Alive[T, Entry], key: int, _: weakref.ref[T]) -> None:
    table.pop(key, None)
    if not (_watched or _alone or _layers or _replaced or _manifolds or _running):
        while _hooks:
            _hooks.pop().remove()


def _install() -> None:
    _hooks.extend([register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)])


def _alive(table: _Alive[T, Entry]) -> Iterator[tuple[T, Entry]]:
    for present, entry in list(table.values()):
        thing = present()
        if thing is not None:
            yield thing, entry


watch: Callable[[WatchedWeight, tuple[bool, dict[str, str]]], None] = functools.partial(_remember, _watched)
"""Adds a coordinate list, whether it holds frames, and its manifolds; no optimizer should shrink its coordinates."""
watch_frame: Callable[[Tensor, str], None] = functools.partial(_remember, _alone)
"""Adds a frame that no coordinate list holds, and its manifold."""
watch_layer: Callable[[WatchedLayer, str], None] = functools.partial(_remember, _layers)
"""Adds a layer with coordinates of its own, and its name; no optimizer should shrink them."""


def watch_manifold(manifold: type) -> None:
    """Adds a class of manifolds in geoopt's interface, whose tensors no other optimizer may move."""
    _looked.clear()
    _manifolds.append(manifold)
    if not _hooks:
        _install()


def mark_replaced(
    parameters: Iterable[Tensor], weight: str, event: str, replacement: WatchedWeight | nn.Parameter
) -> None:
    """Remembers parameters that a module has given up for a replacement, as long as somebody else holds them.

    An optimizer that holds the replacement as well is fine. The event is what took them, "sk.orthogonal", and the
    weight its name, "Linear.weight".
    """
    _looked.clear()
    for p in parameters:
        entry = _Replaced(weight, event, weakref.ref(replacement), p.grad is not None)
        _replaced[id(p)] = weakref.ref(p, functools.partial(_forget, _replaced, id(p))), entry


def manifold_of(p: object) -> str | None:
    """Returns the manifold that a tensor of geoopt's says it is on, as `MANIFOLDS` call it if they do; or None."""
    return name_of_manifold(getattr(p, "manifold", None))


def name_of_manifold(manifold: object) -> str | None:
    """Returns what `MANIFOLDS` call a manifold in geoopt's interface, or its own name; None for anything else."""
    geoopt = sys.modules.get("geoopt")
    if geoopt is None or not isinstance(manifold, geoopt.Manifold) or isinstance(manifold, geoopt.Euclidean):
        return None
    name = getattr(manifold, "name", None) or type(manifold).__name__
    if isinstance(manifold, (geoopt.Stiefel, *_manifolds)):
        return MANIFOLDS[getattr(manifold, "metric", name) not in ("canonical", geoopt.CanonicalStiefel.name)]
    return name


def coordinate_lists(of_frames: bool = True) -> list[WatchedWeight]:
    """Returns the coordinate lists alive, all or those that hold frames."""
    return [one for one, (holds_frames, _) in _alive(_watched) if holds_frames or not of_frames]


def frames_alone() -> list[Tensor]:
    """Returns the frames alive that no coordinate list holds."""
    return [frame for frame, _ in _alive(_alone)]


def frames() -> dict[int, Frame]:
    """Returns id to `Frame` of every parameter alive that must stay on a manifold, as its coordinate list holds it now.

    Under FSDP2 these are the sharded parameters, as the optimizer has them. Look up at once: an id means nothing once
    its parameter is replaced.
    """
    found = {id(frame): Frame(None, "stiefel", manifold) for frame, manifold in _alive(_alone)}
    for watched, (_, manifolds) in _alive(_watched):
        for name, c in watched.coordinates.items() if manifolds else ():
            if name in manifolds:
                found[id(c)] = Frame(watched, name, manifolds[name])
    return found


def was_moved(frame: Tensor) -> bool:
    """Returns whether it was an optimizer along its manifold, still alive, that has written to a frame last."""
    count = write_count(frame)
    return any(counts.get(id(frame)) == count for counts in list(_moved.values()))


def is_left_between_landings(frame: Tensor) -> bool:
    """Returns whether the optimizer of a frame lands it on the manifold after some steps only."""
    groups = [group for optimizer in list(_moved) for group in optimizer.param_groups if group.get("every", 1) > 1]
    return any(p is frame for group in groups for p in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raises OptimizerError before a step that would take a frame off its manifold.

    At an optimizer's first step, and again after weights or groups have changed, it warns of what else it holds.
    """
    # torch's ZeroRedundancyOptimizer has the one that steps, for the share of its rank, in `optim`.
    own, known = _looked.get(optimizer) or (moves_frames(optimizer, vars(optimizer).get("optim")), None)
    suspects, stamp = _suspects(optimizer, own)
    is_known = known == stamp
    if is_known and (own or not suspects):
        return  # one that moves frames has refused them in its other groups when they were added
    _running.append(optimizer)
    try:
        if suspects:
            _refuse(optimizer, [p for group in suspects for p in group["params"]])
        if not is_known:
            _looked[optimizer] = own, stamp
            held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
            _warn_of_replaced(optimizer, held)
            _warn_of_decay(optimizer)
            _warn_of_eps(optimizer, held)
    finally:
        _running.pop()


def _suspects(optimizer: torch.optim.Optimizer, own: bool) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Returns the groups that may hold no frame, and the numbers of parameters and of these groups."""
    count, suspects = 0, []
    for group in optimizer.param_groups:
        count += len(group["params"])
        if not own or group.get("manifold", "any") is None:
            suspects.append(group)
    return suspects, (count, len(suspects))


def moves_frames(*optimizers: object) -> bool:
    """Returns whether an optimizer, or a class of them, says that it moves frames along their manifold."""
    for optimizer in optimizers:
        if getattr(optimizer, "moves_frames", False):
            return True
    return False


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Remembers what an optimizer has moved along its manifold, for `was_moved`."""
    if optimizer not in _moved and not (moves_frames(optimizer) or _is_geoopts(optimizer)):
        return
    moved: list[Tensor] = []
    for group in optimizer.param_groups:
        if group.get("manifold", "any") is not None:
            moved += group["params"]
    _moved[optimizer] = dict(zip(map(id, moved), map(write_count, moved), strict=True))


def _refuse(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Raises OptimizerError if a parameter is a frame that the optimizer would not move along its manifold."""
    found, manifolds = frames(), tuple(_manifolds)
    for p in params if found or manifolds else ():
        # geoopt's are of classes of its own, and an attribute of a thousand plain ones takes time
        on = None if type(p) is nn.Parameter else getattr(p, "manifold", None)
        says = on is not None and (isinstance(on, manifolds) or isinstance(getattr(on, "base", None), manifolds))
        is_bound = says or id(p) in found
        if is_bound and (p.requires_grad or p.grad is not None) and not _is_geoopts(optimizer, p):
            raise OptimizerError(_in_words(optimizer, p, found.get(id(p)) or Frame(None, "stiefel", "")))


def _is_geoopts(optimizer: torch.optim.Optimizer, p: Tensor | None = None) -> bool:
    mixin, tensor = sys.modules.get("geoopt.optim.mixin"), sys.modules.get("geoopt.tensor")
    if mixin is None or tensor is None or not isinstance(optimizer, mixin.OptimMixin):
        return False
    return p is None or isinstance(p, tensor.ManifoldTensor)


def _in_words(optimizer: torch.optim.Optimizer, p: Tensor, frame: Frame) -> str:
    size, name = " x ".join(map(str, p.shape)), type(optimizer).__name__
    got = f"got {frame.title} ({size}), which must stay on its manifold"
    alone = frame.coordinate_list is None
    if _is_geoopts(optimizer):
        remedy = "geoopt.ManifoldParameter(w, sk.manifolds.Stiefel())" if alone else "sk.optim.geoopt_parameters(model)"
        return f"{name} needs frames as geoopt's own parameters, {got}; give it {remedy}."
    groups = "sk.optim.frames([w])" if alone else "sk.optim.parameter_groups(model, lr=...)"
    if moves_frames(optimizer):
        return f"{name} needs groups that name the manifold of frames, {got}, in one without; give it {groups}."
    return f"{name} needs parameters that may move freely, {got}; use sk.optim.MultiplicativeCayley({groups})."


def _warn_of_replaced(optimizer: torch.optim.Optimizer, held: dict[int, Tensor]) -> None:
    """Warns of parameters that another module still reads, and of those that none does."""
    found: dict[tuple[bool, str], dict[str, None]] = {}
    for key, p in held.items():
        _, entry = _replaced.pop(key, (None, None))
        if entry is None or not p.requires_grad:
            continue
        new = entry.replacement()
        name = entry.weight if new is None or isinstance(new, Tensor) else new.weight
        trains = () if new is None else [new] if isinstance(new, Tensor) else new.coordinates.values()
        is_read = p.grad is not None and not entry.had_gradient
        if is_read or not any(id(one) in held for one in trains):
            found.setdefault((is_read, entry.event), {})[name] = None
    for (is_read, event), names in sorted(found.items(), reverse=True):
        what = f"what {enumerated([*names])} had before {event}"
        broken = (
            f"trains {what}: another module was tied to it, and the tie is broken; "
            'sk.tie(module, "weight", other, "weight") ties them again; make the optimizer after that.'
        )
        lost = (
            f"holds {what}, which no module reads any more, and does not train what took its place; make a new "
            "optimizer."
        )
        warn_caller(f"{type(optimizer).__name__} {broken if is_read else lost}")


def _warn_of_decay(optimizer: torch.optim.Optimizer) -> None:
    """Warns of coordinates that weight decay shrinks, unless their group has their name, as one that was asked for."""
    decays: dict[int, tuple[float, object]] = {}
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if isinstance(decay, int | float) and decay > 0:
            decays |= {id(p): (float(decay), group.get("name")) for p in group["params"] if p.requires_grad}
    if not decays:
        return
    shrunk: list[tuple[str, str, float]] = []
    lists = coordinate_lists(of_frames=False)
    free = [(one.weight, one.param.manifolds, name, c) for one in lists for name, c in one.coordinates.items()]
    for layer, title in _alive(_layers):
        keys = layer.coordinate_keys().items()
        free += [(f"{title}.{key}", {}, name, layer.get_parameter(key)) for key, name in keys]
    for weight, manifolds, name, c in free:
        decay, group_name = decays.get(id(c), (0.0, name))
        if name not in manifolds and group_name != name and name != "gain":  # the decay of a gain is that of a weight
            shrunk.append((weight, name, decay))
    if not shrunk:
        return
    weights, names = ([*dict.fromkeys(some)] for some in list(zip(*shrunk, strict=True))[:2])
    values = {decay for *_, decay in shrunk}
    warn_caller(
        f"{type(optimizer).__name__} shrinks {', '.join(map(repr, names))} of {enumerated(weights)} by weight_decay"
        f"{'=' if len(values) == 1 else ' up to '}{max(values):g}, which moves the frames or rates that they stand for "
        "and regularizes nothing; sk.optim.parameter_groups(model, lr=...) gives coordinates none."
    )


def _warn_of_eps(optimizer: torch.optim.Optimizer, held: dict[int, Tensor]) -> None:
    """Warns of float16 parameters beside coordinates if eps is 0 in float16: 0 / 0 there is NaN in all weights next."""
    is_known = type(optimizer).step.__module__.startswith(("torch.optim.", "stiefelkit."))
    for group in optimizer.param_groups if is_known and not torch.compiler.is_compiling() else ():
        eps = group.get("eps")
        if group.get("fused") or not isinstance(eps, int | float) or eps > 2.0**-25:
            continue  # a fused step computes in float32
        lost = [p for p in group["params"] if p.dtype == torch.float16 and p.requires_grad]
        if lost and any(id(c) in held for watched, _ in _alive(_watched) for c in watched.coordinates.values()):
            shapes = enumerated([f"the one of shape {tuple(p.shape)}" for p in lost])
            return warn_caller(
                f"{type(optimizer).__name__} needs an eps that is not 0 in float16, got {eps:g}, with which small "
                f"gradients of parameters, {shapes}, give NaN, and orthogonal weights next; eps=1e-4 or bfloat16 "
                "stays finite."
            )
