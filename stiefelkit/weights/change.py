"""Changes of an orthogonal weight (assign, draw anew, rebase, tie, bake, shard), and its drift."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefelkit.contract.composite import cores
from stiefelkit.contract.param import each_frame, load_chart_
from stiefelkit.contract.table import find_parametrization
from stiefelkit.contract.view import axis_of
from stiefelkit.errors import DtypeError, NonFiniteError, OptionError, ShapeError, enumerated, needs, warn_caller
from stiefelkit.metrics import bits_lost, frame_tolerance, orthogonality_error, rounding_limit
from stiefelkit.tensors import full_tensor, is_sharded, working_dtype
from stiefelkit.weights import find
from stiefelkit.weights.modules import attach_coordinate_list, check_loading_of, stop_checking
from stiefelkit.weights.optimizer_hooks import mark_replaced

__all__ = ["Drift", "assign_", "bake", "coordinates", "drift", "fully_shard_coordinates", "rebase_", "reset_", "tie"]

M = TypeVar("M", bound=nn.Module)


def assign_(module: nn.Module, name: str, weight: Tensor) -> None:
    """Sets an orthogonal weight to any frame in its map's image, as `module.name = weight` does.

    The frame is checked first, copied, never aliased.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name.
        weight: of the weight's shape, (*, n, p), (*, p, n) if wide, or a kernel's; columns (rows, if wide) orthonormal.
    """
    find.find_weight(module, name, "assign_").coordinate_list.right_inverse(weight)


def reset_(module: nn.Module, name: str, init: str | None = None, generator: torch.Generator | None = None) -> None:
    """Draws an orthogonal weight anew, also one that holds no values yet (`to_empty`), by a scheme of its map.

    When `init` is None that is the scheme given to `orthogonal`, or else the default (Haar).

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name.
        init: a scheme.
        generator: source of randomness; torch's default when None.
    """
    coordinate_list = find.find_weight(module, name, "reset_").coordinate_list
    coordinate_list.draw_(None if init is None else coordinate_list.param.check_scheme(init), generator)


def rebase_(module: nn.Module, name: str, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Takes the present frame of a `"rebased"` weight into its base, and its coordinates back to the identity's.

    The weight stays the same up to rounding; what changes is where the coordinates' origin is, and with it the meaning
    of an optimizer's moments: one that is given forgets its state of these coordinates, as if they were new.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name.
        optimizer: one that trains the coordinates, if its moments shall begin anew.

    >>> from stiefelkit import orthogonal
    >>> layer = orthogonal(nn.Linear(4, 4), "weight", "rebased", inner="matrix_exp")
    >>> rebase_(layer, "weight")
    """
    coordinate_list = find.find_weight(module, name, "rebase_").coordinate_list
    rebased: Any = find_parametrization("rebased")
    whole = coordinate_list.param
    maps: list[Any] = [(p, slice(i, i + len(p.coordinates))) for i, p in cores(whole) if isinstance(p, rebased)]
    needs(bool(maps), OptionError, "rebase_", 'a weight with the map "rebased"', whole.title)
    held = {id(c) for group in getattr(optimizer, "param_groups", ()) for c in group["params"]}
    own = list(coordinate_list.coordinates.values())
    moved = [c for _, share in maps for c in own[share]]
    wanted = f"an optimizer that holds the coordinates of {name!r}"
    holds = optimizer is None or all(id(c) in held for c in moved)
    needs(holds, OptionError, "rebase_", wanted, type(optimizer).__name__)
    coordinate_list.check_assignable()
    present = coordinate_list.gathered()  # of which gains stay
    positions = [param.rebased(*present[share]) for param, share in maps]  # all, before the first is written
    for (param, share), (begun, chart) in zip(maps, positions, strict=True):
        load_chart_(param, chart)
        present[share] = begun
    coordinate_list.fill_(present)
    if isinstance(optimizer, torch.optim.LBFGS):  # keeps one history for all parameters
        optimizer.state.clear()
    elif optimizer is not None:
        for c in moved:
            optimizer.state.pop(c, None)


def coordinates(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Returns name to parameter of an orthogonal weight's coordinates.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name, "weight" or "encoder.0.weight".
    """
    return find.find_weight(module, name, "coordinates").coordinate_list.coordinates


def bake(module: M, name: str | None = None) -> M:
    """Replaces an orthogonal weight by one plain parameter that holds the frame, and returns the module.

    Copies of the module are not touched. The parameter is a new one: optimizers must be told. One of several tied
    weights comes apart from the others, with a warning.

    Args:
        module: the module.
        name: the weight's name; None bakes every orthogonal weight of the module and of those inside it, as
            `torch.onnx.export` needs.

    >>> from stiefelkit import orthogonal
    >>> type(bake(orthogonal(nn.Linear(4, 4), "weight"))).__name__
    'Linear'
    """
    find.check_module(module, "bake")
    chosen = [*find.orthogonal_weights(module)] if name is None else [find.find_weight(module, name, "bake")]
    baked: dict[nn.Module, nn.Parameter] = {}
    for weight in chosen:
        baked[weight.coordinate_list] = _bake(weight, baked.get(weight.coordinate_list))
    stop_checking(module)
    tied = [weight.qualified for weight in find.orthogonal_weights(module) if weight.coordinate_list in baked]
    if tied:
        warnings.warn(
            f"{chosen[0].qualified} and {', '.join(tied)} were one weight and are now two; without a name "
            "sk.bake makes one parameter of them.",
            stacklevel=2,
        )
    return module


def _bake(weight: find.OrthogonalWeight, frame: nn.Parameter | None) -> nn.Parameter:
    """Bakes one weight, into a parameter that is given for one that is tied to it, and returns the parameter."""
    path, module, name, coordinate_list = weight
    is_read = parametrize.is_parametrized(module, name)
    needs(is_read, OptionError, "bake", "a module that reads its weight", f"{path} of a traced graph; bake, then trace")
    trains = any(c.requires_grad for c in coordinate_list.coordinates.values())
    with torch.no_grad():
        coordinate_list.project_external_writes(by_value=True)
        frame = nn.Parameter(getattr(module, name).detach().clone(), trains) if frame is None else frame
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    delattr(module, name)
    module.register_parameter(name, frame)
    mark_replaced(coordinate_list.coordinates.values(), coordinate_list.weight, "sk.bake", frame)
    return frame


def tie(module: nn.Module, name: str, other: nn.Module, other_name: str) -> None:
    """Makes a second module read the same orthogonal weight: one set of coordinates, whose gradients add up.

    For what one would write as `decoder.weight = encoder.weight`, as of an embedding and the layer before a softmax.
    State dicts hold the coordinates under both names, copies stay tied, and `sk.bake(model)` leaves one parameter.

    Args:
        module: the module that has the orthogonal weight.
        name: its name there; "encoder.weight" of a module inside.
        other: the module that shall read it as well.
        other_name: the name of the weight that it takes the place of, plain or orthogonal, of the same shape.

    >>> import torch
    >>> from stiefelkit import orthogonal
    >>> encoder, decoder = nn.Embedding(9, 4), nn.Linear(4, 9)
    >>> tie(orthogonal(encoder, "weight"), "weight", decoder, "weight")
    >>> torch.equal(encoder.weight, decoder.weight)
    True
    """
    first = find.find_weight(module, name, "tie")
    coordinate_list = first.coordinate_list
    find.check_module(other, "tie")
    second = find.find_path(other, other_name)
    is_other = (first.host, first.name) != (second.host, second.name)
    needs(is_other, OptionError, "tie", "two weights", f"{coordinate_list.weight} twice")
    present = find.coordinate_list_of(second.host, second.name)
    if present is coordinate_list:
        return
    old, at = (find.plain_weight(second),) * 2 if present is None else (present.param, present.original0)
    device, there = coordinate_list.original0.device, at.device
    param = coordinate_list.param
    got = f"{param.shape}, {param.dtype} on {device}, and {tuple(old.shape)}, {old.dtype} on {there}"
    needs(tuple(old.shape) == param.shape, ShapeError, "tie", "weights of one shape", got)
    needs((old.dtype, there) == (param.dtype, device), DtypeError, "tie", "weights of one dtype and device", got)
    weight = coordinate_list.weight
    attach_coordinate_list([second], coordinate_list, "sk.tie")
    coordinate_list.weight = weight
    check_loading_of(other, other_name)


@dataclass(frozen=True)
class Drift:
    """The distance of a weight from a frame.

    Attributes:
        error: :math:`‖W^H W - I‖_F` in float64, the worst of a batch, or of blocks.
        limit: what rounding an exact square frame to the weight's dtype costs, `stiefelkit.metrics.rounding_limit`;
            tall ones mostly cost less.
        bits_lost: binary digits lost beyond that, :math:`log_2(max(error / limit, 1))`.
    """

    error: float
    limit: float
    bits_lost: float

    def __repr__(self) -> str:
        return f"Drift(error={self.error:.3g}, limit={self.limit:.3g}, bits_lost={self.bits_lost:.2g})"


@torch.no_grad()
def drift(
    model: nn.Module,
    where: find.Where | None = None,
    *,
    view: str | None = None,
    blocks: int | Sequence[int] | None = None,
    dim: int = 0,
    gain: float = 1.0,
) -> dict[str, Drift]:
    """Returns qualified name, "rnn.weight_hh_l0", to `Drift` of every orthogonal weight of a model, on every rank.

    What is measured is the map's own frame, without its gain and without parametrizations that were put on top of it,
    of the coordinates as they are stored: a mean that was written into a frame shows its error until the next read
    replaces it.

    Without `where=`, weights without a map are not measured; a model that has only such, some of which look like
    frames, is warned of. With it those that are chosen are measured, each as its module reads it: plain parameters,
    buffers, weights that torch or geotorch parametrizes. Wide ones are measured by rows.

    Args:
        model: any module.
        where: which weights, as `stiefelkit.orthogonal` takes it.
        view: of those without a map: how a convolution's kernel is read.
        blocks: of those without a map: how many weights stand side by side in one, or the size of each.
        dim: along which dimension they do.
        gain: of those without a map: what they are divided by first.
    """
    find.check_module(model, "drift", "; sk.metrics.orthogonality_error measures a tensor")
    if where is None:
        drifts = drift_of_maps(model)
        if not drifts and (names := _like_frames(model)):
            warn_caller(
                f"sk.drift measures weights with a map, got a model with none, of which {enumerated(names)} look like "
                f"frames; sk.drift(model, where={names[:3]!r}) measures them."
            )
        return drifts
    drifts = {}
    for place in find.choose(model, where, "drift", of_buffers=True):
        held = find.coordinate_list_of(place.host, place.name)
        if held is not None:
            frames = each_frame(held.param.bare(*held.gathered()))
        else:
            w: Tensor = full_tensor(getattr(place.host, place.name))
            views = find.views_of(place, w, "drift", view, blocks, dim)
            axis = axis_of(views[0].name, w.shape, dim)
            parts = w.split([each.shape[axis] for each in views], axis)
            frames = tuple(each.to_frame(part / gain) for each, part in zip(views, parts, strict=True))
        drifts[place.qualified] = _worst(frames, place.qualified)
    return drifts


@torch.no_grad()
def drift_of_maps(model: nn.Module) -> dict[str, Drift]:
    """Returns what `drift` does of weights with a map."""
    lists = {weight.qualified: weight.coordinate_list for weight in find.orthogonal_weights(model)}
    return {name: _worst(each_frame(one.param.bare(*one.gathered())), name) for name, one in lists.items()}


def _like_frames(model: nn.Module) -> list[str]:
    """Returns the names of matrices whose rows or columns are orthonormal; most others are told by their norm alone."""
    found = []
    for place in find.matrices_of(model):
        w = getattr(place.host, place.name)
        if not isinstance(w, Tensor) or w.dim() != 2 or w.is_meta or is_sharded(w) or w.itemsize == 1:
            continue
        p = min(w.shape)
        square = torch.linalg.vector_norm(w, dtype=working_dtype(w.dtype)).item() ** 2
        tolerance = frame_tolerance(p, w.dtype)
        if p > 1 and abs(square - p) <= p**0.5 * tolerance:
            tall = w if w.shape[0] >= w.shape[1] else w.mH
            found += [place.qualified] if orthogonality_error(tall).item() <= tolerance else []
    return found


def _worst(frames: Sequence[Tensor], qualified: str) -> Drift:
    found = []
    for q in frames:
        error, limit = orthogonality_error(q).max().item(), rounding_limit(q.shape[-1], q.dtype)
        needs(math.isfinite(error), NonFiniteError, qualified, "finite entries", "NaN or infinity")
        found.append(Drift(error, limit, bits_lost(error, limit)))
    return max(found, key=lambda d: d.error / d.limit)


def fully_shard_coordinates(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    """Makes the coordinates of every orthogonal weight an FSDP2 unit of their own, and returns the model.

    FSDP2 wants one dtype in a unit, and coordinates are float32 where a model is bfloat16. Call it before
    `torch.distributed.fsdp.fully_shard` on the layers and on the model; where all parameters are of one dtype it is not
    needed.

    Call it once. A mixed-precision policy with `param_dtype` belongs to none of the units, since frames are computed
    from coordinates as they are: make the model bfloat16 instead. FSDP2 takes no weight without coordinates (1 x 1).
    The device mesh and the options are those of `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    find.check_module(model, "fully_shard_coordinates")
    cast = getattr(options.get("mp_policy"), "param_dtype", None)
    wanted = "coordinates in their own dtype"
    needs(cast is None, OptionError, "fully_shard_coordinates", wanted, f"mp_policy with {cast}")
    for weight in find.orthogonal_weights(model):
        if any(c.numel() for c in weight.coordinate_list.coordinates.values()):
            fully_shard(weight.coordinate_list, mesh=mesh, **options)
    return model
