"""A hook before each step of a torch optimizer, which refuses to break frames and warns of wrong parameters.

A coordinate list announces itself once, and so does who has a frame without a module. Nothing is stored in the tensors,
which FSDP2 and casts replace: which parameter is a frame is looked up when it matters, among the coordinate lists and
the tensors that are still alive. Only geoopt's parameters say themselves where they live.
"""

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stiefelkit._torch import write_count
from stiefelkit.errors import OptimizerError, enumerated, warn_caller

MANIFOLDS = ("stiefel:canonical", "stiefel:euclidean")
"""The manifolds that optimizers know, each with its metric."""


class Frame(NamedTuple):
    """The owner of a parameter that is a frame; the coordinate list is None for one without a module."""

    coordinate_list: Any
    name: str
    manifold: str

    @property
    def title(self) -> str:
        """The name in messages, "the frame of Linear.weight"."""
        weight = None if self.coordinate_list is None else self.coordinate_list.weight
        return "a frame without a module" if weight is None else f"the frame of {weight}"


class _Retired(NamedTuple):
    """A parameter given to `retire`, its gradient at that time, and how often that had been written to."""

    parameter: weakref.ref[Tensor]
    weight: str
    event: str
    is_coordinate: bool
    heir: weakref.ref[Any]
    gradient: tuple[weakref.ref[Tensor], int] | None


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
"""The coordinate lists alive, which stand on a floor above."""
_of_frames: weakref.WeakSet[Any] = weakref.WeakSet()
_alone: dict[int, tuple[weakref.ref[Tensor], str]] = {}
_manifolds: list[type] = []
"""Classes of manifolds; the tensors that say they are on one are watched too."""
_retired: dict[int, _Retired] = {}
_looked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The numbers of parameters and groups of each optimizer that was checked since the last `watch` or `retire`."""
_accepted: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The same numbers of optimizers that have refused frames in free groups themselves."""
_moved: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = weakref.WeakKeyDictionary()
"""The write count of each frame after its optimizer's last step, by id."""


def _forget_checks() -> None:
    _looked.clear()
    _accepted.clear()


def accept(optimizer: torch.optim.Optimizer) -> None:
    """Notes that an optimizer that moves frames has refused them in its other groups, for its first step."""
    suspects, stamp = _suspects(optimizer, own=True)
    if suspects:
        _accepted[optimizer] = stamp


@functools.cache
def _install() -> None:
    """Registers the hooks, once."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def watch(coordinate_list: Any, holds_frames: bool) -> None:
    """Adds a coordinate list, whose coordinates no optimizer should shrink; it is forgotten when it dies."""
    _forget_checks()
    _watched.add(coordinate_list)
    if holds_frames:
        _of_frames.add(coordinate_list)
    _install()


def watch_frame(frame: Tensor, manifold: str) -> None:
    """Adds a frame that no coordinate list holds; it is forgotten when it dies."""
    _forget_checks()
    key = id(frame)
    _alone[key] = weakref.ref(frame, functools.partial(_alone.pop, key)), manifold
    _install()


def watch_manifold(manifold: type) -> None:
    """Adds a class of manifolds in geoopt's interface, whose tensors no other optimizer may move."""
    _forget_checks()
    _manifolds.append(manifold)
    _install()


def retire(parameters: Iterable[Tensor], weight: str, event: str, heir: Any, *, are_coordinates: bool = False) -> None:
    """Remembers parameters that a module has given up for an heir, as long as somebody else holds them.

    The heir is a coordinate list or a parameter; an optimizer that holds it as well is fine. The event is what took
    them, "sk.orthogonal", and the weight its name, "Linear.weight".
    """
    _forget_checks()
    for p in parameters:
        present = weakref.ref(p, functools.partial(_retired.pop, id(p)))
        gradient = None if p.grad is None else (weakref.ref(p.grad), write_count(p.grad))
        _retired[id(p)] = _Retired(present, weight, event, are_coordinates, weakref.ref(heir), gradient)
    _install()


def manifold_of(p: Any) -> str | None:
    """Returns the manifold that a tensor of geoopt's says it is on, as `MANIFOLDS` call it if they do; or None."""
    return name_of_manifold(getattr(p, "manifold", None))


def name_of_manifold(manifold: Any) -> str | None:
    """Returns what `MANIFOLDS` call a manifold in geoopt's interface, or its own name; None for anything else."""
    geoopt = sys.modules.get("geoopt")
    if manifold is None or geoopt is None or not isinstance(manifold, geoopt.Manifold):
        return None
    if isinstance(manifold, geoopt.Euclidean):
        return None
    if isinstance(manifold, (geoopt.Stiefel, *_manifolds)):
        canonical = getattr(manifold, "metric", manifold.name) in ("canonical", geoopt.CanonicalStiefel.name)
        return MANIFOLDS[not canonical]
    return manifold.name or type(manifold).__name__


def coordinate_lists() -> list[Any]:
    """Returns the coordinate lists alive that hold frames."""
    return list(_of_frames)


def frames_alone() -> list[Tensor]:
    """Returns the frames alive that no coordinate list holds."""
    return [frame for alive, _ in list(_alone.values()) if (frame := alive()) is not None]


def frames() -> dict[int, Frame]:
    """Returns id to `Frame` of every parameter alive that must stay on a manifold, as its coordinate list holds it now.

    Under FSDP2 these are the sharded parameters, as the optimizer has them. Look up at once: an id means nothing once
    its parameter is replaced.
    """
    alone = list(_alone.items())
    found = {key: Frame(None, "stiefel", manifold) for key, (alive, manifold) in alone if alive() is not None}
    for coordinate_list in list(_of_frames):
        manifolds = coordinate_list.param.manifolds
        for name, c in coordinate_list.coordinates.items() if manifolds else ():
            if name in manifolds:
                found[id(c)] = Frame(coordinate_list, name, manifolds[name])
    return found


def was_moved(frame: Tensor) -> bool:
    """Returns whether it was an optimizer along its manifold, still alive, that has written to a frame last."""
    count = write_count(frame)
    return any(counts.get(id(frame)) == count for counts in list(_moved.values()))


def is_left_between_landings(frame: Tensor) -> bool:
    """Returns whether the optimizer of a frame lands it on the manifold after some steps only."""
    groups = [group for optimizer in list(_moved) for group in optimizer.param_groups if group.get("every", 1) > 1]
    return any(p is frame for group in groups for p in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises OptimizerError before a step that would take a frame off its manifold.

    At an optimizer's first step, and again after weights or groups have changed, it warns of what else it holds.
    """
    # torch's ZeroRedundancyOptimizer has the one that steps, for the share of its rank, in `optim`.
    own = getattr(optimizer, "moves_frames", False) or getattr(getattr(optimizer, "optim", None), "moves_frames", False)
    suspects, stamp = _suspects(optimizer, own)
    is_known = _looked.get(optimizer) == stamp
    # One that moves frames has refused them in its other groups when they were added.
    is_accepted = own and (is_known or _accepted.get(optimizer) == stamp)
    if suspects and not is_accepted and (_of_frames or _alone or _manifolds):
        _refuse(optimizer, suspects)
    if is_known:
        return
    _looked[optimizer] = stamp
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    _warn_of_retired(optimizer, held, [_retired.pop(key) for key in held if key in _retired])
    _warn_of_decay(optimizer)
    _warn_of_eps(optimizer, held)


def _suspects(optimizer: torch.optim.Optimizer, own: bool) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Returns the groups that may hold no frame, and the numbers of parameters and of these groups."""
    count, suspects = 0, []
    for group in optimizer.param_groups:
        count += len(group["params"])
        if not own or group.get("manifold", "any") is None:
            suspects.append(group)
    return suspects, (count, len(suspects))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Remembers what an optimizer has moved along its manifold, for `was_moved`."""
    if not _of_frames or not (getattr(optimizer, "moves_frames", False) or _is_geoopts(optimizer)):
        return
    moved: list[Tensor] = []
    for group in optimizer.param_groups:
        if group.get("manifold", "any") is not None:
            moved += group["params"]
    _moved[optimizer] = dict(zip(map(id, moved), map(write_count, moved), strict=True))


def _refuse(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raises OptimizerError if a group holds a frame that the optimizer would not move along its manifold."""
    found, manifolds = frames(), tuple(_manifolds)
    for group in groups:
        for p in group["params"]:
            # geoopt's are of classes of its own, and an attribute of a thousand plain ones takes time
            on = None if type(p) is nn.Parameter else getattr(p, "manifold", None)
            says = on is not None and (isinstance(on, manifolds) or isinstance(getattr(on, "base", None), manifolds))
            is_bound = says or id(p) in found
            if is_bound and (p.requires_grad or p.grad is not None) and not _is_geoopts(optimizer, p):
                raise OptimizerError(_in_words(optimizer, p, found.get(id(p)) or Frame(None, "stiefel", "")))


def _is_geoopts(optimizer: torch.optim.Optimizer, p: Any = None) -> bool:
    """Returns whether an optimizer is one of geoopt's and a parameter is one that it moves along a manifold."""
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
    if getattr(optimizer, "moves_frames", False):
        return f"{name} needs groups that name the manifold of frames, {got}, in one without; give it {groups}."
    return f"{name} needs parameters that may move freely, {got}; use sk.optim.MultiplicativeCayley({groups})."


def _warn_of_retired(optimizer: torch.optim.Optimizer, held: dict[int, Tensor], retired: list[_Retired]) -> None:
    """Warns of parameters that another module still reads, and of those that none does."""
    found: dict[tuple[bool, str, bool], list[_Retired]] = {}
    for one in retired:
        p, heir = one.parameter(), one.heir()
        if p is None or not p.requires_grad:
            continue
        successors = [heir] if isinstance(heir, Tensor) else getattr(heir, "coordinates", {}).values()
        old, version = one.gradient or (lambda: None, 0)
        is_read = p.grad is not None and not (old() is p.grad and version == write_count(p.grad))
        if is_read or not any(id(s) in held for s in successors):
            found.setdefault((is_read, one.event, one.is_coordinate), []).append(one)
    names = _qualified_names() if found else {}
    for (is_read, event, is_coordinate), some in sorted(found.items(), key=lambda item: not item[0][0]):
        weights = list(dict.fromkeys(names.get(id(one.heir()), one.weight) for one in some))
        is_one = len(weights) == 1 and not is_coordinate
        of = "the coordinates of " if is_coordinate else ""
        what = f"{of}{enumerated(weights)} as {'it was' if is_one else 'they were'} before {event}"
        if is_read:
            warn_caller(
                f"{what} still {'gets' if is_one else 'get'} a gradient: another module is tied to "
                f"{'it' if is_one else 'each'}, and the tie is broken; "
                'sk.tie(module, "weight", other, "weight") ties them again; make the optimizer after that.'
            )
        else:
            warn_caller(
                f"{type(optimizer).__name__} holds {what}, which no module reads any more, and does not train what "
                f"took {'its' if is_one else 'their'} place; make a new optimizer."
            )


def _warn_of_decay(optimizer: torch.optim.Optimizer) -> None:
    """Warns of coordinates that weight decay shrinks, unless their group has their name, as one that was asked for."""
    decayed: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if isinstance(decay, int | float) and decay > 0:
            decayed.update((id(p), group) for p in group["params"] if p.requires_grad)
    if not decayed:
        return
    owners = {id(c): (one, name) for one in list(_watched) for name, c in one.coordinates.items()}
    shrunk: list[tuple[Any, str, float]] = []
    for key, group in decayed.items():
        one, name = owners.get(key, (None, ""))
        # The decay of a gain is that of a weight.
        if one is not None and name != "gain" and group.get("name") != name and name not in one.param.manifolds:
            shrunk.append((one, name, float(group["weight_decay"])))
    if not shrunk:
        return
    names = _qualified_names()
    weights: list[str] = list({id(owner): names.get(id(owner)) or owner.weight for owner, _, _ in shrunk}.values())
    coordinates = ", ".join(dict.fromkeys(repr(name) for _, name, _ in shrunk))
    decays = {decay for *_, decay in shrunk}
    warn_caller(
        f"{type(optimizer).__name__} shrinks {coordinates} of {enumerated(weights)} by weight_decay"
        f"{'=' if len(decays) == 1 else ' up to '}{max(decays):g}, which moves the frame{'s'[: len(weights) > 1]} and "
        "regularizes nothing; sk.optim.parameter_groups(model, lr=...) gives coordinates none."
    )


def _warn_of_eps(optimizer: torch.optim.Optimizer, held: dict[int, Tensor]) -> None:
    """Warns of float16 parameters beside coordinates if eps is 0 in float16: 0 / 0 there is NaN in all weights next."""
    is_known = type(optimizer).step.__module__.startswith(("torch.optim.", "stiefelkit."))
    for group in optimizer.param_groups if is_known and not torch.compiler.is_compiling() else ():
        eps = group.get("eps")
        if group.get("fused") or not isinstance(eps, int | float) or eps > 2.0**-25:
            continue  # a fused step computes in float32
        lost = [p for p in group["params"] if p.dtype == torch.float16 and p.requires_grad]
        if lost and any(id(c) in held for one in list(_watched) for c in one.coordinates.values()):
            names = _qualified_names()
            lost_ones = enumerated([names.get(id(p), f"one of shape {tuple(p.shape)}") for p in lost])
            return warn_caller(
                f"{type(optimizer).__name__} needs an eps that is not 0 in float16, got {eps:g}, with which small "
                f"gradients of {lost_ones} give NaN, and orthogonal weights next; eps=1e-4 or bfloat16 stays finite."
            )


def _qualified_names() -> dict[int, str]:
    """Returns id to name, "encoder.0.weight", of coordinate lists and parameters in sight of the caller of `step`.

    These are among the local and global variables of the functions at work, and the attributes of their `self`. Of two
    names the longer one is taken, that of the outer module. (To ask the garbage collector for all modules would do harm
    to other threads, in the midst of making a tuple.)
    """
    coordinate_lists = {id(coordinate_list) for coordinate_list in list(_watched)}
    models: dict[int, nn.Module] = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        attributes = getattr(frame.f_locals.get("self"), "__dict__", None)
        for held in (frame.f_locals, frame.f_globals, attributes if isinstance(attributes, dict) else {}):
            models.update((id(value), value) for value in list(held.values()) if issubclass(type(value), nn.Module))
        frame = frame.f_back
    names: dict[int, str] = {}
    for model in models.values():
        for name, member in _named(model, "", coordinate_lists, set()):
            if name.count(".") > names.get(id(member), "").count("."):
                names[id(member)] = name
    return names


def _named(module: nn.Module, prefix: str, coordinate_lists: set[int], seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(module))
    # Not by getattr: a module may be half made, or pass on the attributes of another.
    parameters, children = (vars(module).get(key) for key in ("_parameters", "_modules"))
    for name, p in parameters.items() if isinstance(parameters, dict) else ():
        yield prefix + name, p
    for name, child in children.items() if isinstance(children, dict) else ():
        if id(child) in coordinate_lists:
            yield prefix.removesuffix("parametrizations.") + name, child
        elif child is not None and id(child) not in seen:
            yield from _named(child, f"{prefix}{name}.", coordinate_lists, seen)
