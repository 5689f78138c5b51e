"""Parameter groups: of frames without a module, one per coordinate of a model, and geoopt's parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from stiefelkit.errors import DtypeError, OptimizerError, OptionError, UnknownNameError, did_you_mean, needs, shown
from stiefelkit.numbers import as_python_number, at_least, is_number
from stiefelkit.optim.checks import check_manifold, check_members, listed
from stiefelkit.optim.settings import RATE
from stiefelkit.tensors import is_sharded
from stiefelkit.weights import optimizer_hooks
from stiefelkit.weights.find import check_module, orthogonal_weights
from stiefelkit.weights.modules import CoordinateParameters
from stiefelkit.weights.optimizer_hooks import MANIFOLDS


def frames(params: Tensor | Iterable[Tensor], *, manifold: str | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Makes parameter groups, one a manifold, of frames that need no module, for the optimizers of this package.

    What PCA, Procrustes or ICA need: a leaf tensor with orthonormal columns, a loss, an optimizer.

        w = torch.nn.Parameter(sk.init.haar((40, 5)))
        optimizer = sk.optim.CayleySGD(sk.optim.frames([w]), lr=0.1)

    From now on optimizers that would take such a tensor off its manifold are refused at their first step, as they are
    for the frames of modules.

    Args:
        params: a frame or several, leaf tensors of shape (*, n, p), :math:`n ≥ p`, float32 or better, real or complex.
        manifold: a name, "stiefel:canonical" or "stiefel:euclidean", which differ in the metric; when None that on
            which a `geoopt.ManifoldParameter` says it is, and canonical for any other.
        **settings: the group's, `lr=0.01`.

    >>> import torch, stiefelkit as sk
    >>> w = torch.nn.Parameter(sk.init.identity((4, 2)))
    >>> optimizer = sk.optim.CayleySGD(frames(w), lr=0.1)
    >>> (w.sum() ** 2).backward()
    >>> optimizer.step()
    >>> sk.metrics.orthogonality_error(w).item() < 1e-14
    True
    """
    who = "sk.optim.frames"
    members = [params] if isinstance(params, Tensor | nn.Module) else listed(who, params)
    needs(bool(members), OptionError, who, "a frame or several", "none")
    for p in members:
        kind = type(p).__name__
        needs(isinstance(p, Tensor), DtypeError, who, "tensors, as parameter_groups gives those of a model", kind)
    if manifold is not None:
        check_manifold(who, manifold)
    check_members(who, manifold or MANIFOLDS[0], members)
    for p in members:
        got = "one that does not require grad" if p.is_leaf else "one that was computed"
        is_trained = p.is_leaf and p.requires_grad
        needs(is_trained, OptionError, who, "tensors to train, as torch.nn.Parameter(w.detach()) makes them", got)
    watched = optimizer_hooks.frames()
    groups: dict[str, list[Tensor]] = {}
    for p in members:
        own = manifold or optimizer_hooks.manifold_of(p) or MANIFOLDS[0]
        groups.setdefault(own, []).append(p)
        if id(p) not in watched:
            optimizer_hooks.watch_frame(p, own)
    shared = {"name": "frames", "weight_decay": 0.0, **as_python_number(settings, keep=Tensor)}
    return [{"params": some, "manifold": own, **shared} for own, some in groups.items()]


def parameter_groups(
    model: nn.Module, lr: float, *, weight_decay: float | None = None, **per_coordinate: Mapping[str, Any] | float
) -> list[dict[str, Any]]:
    """Splits a model's parameters into groups for an optimizer: the plain ones, then one group per coordinate.

    Coordinates get `weight_decay=0` unless asked otherwise: shrinking them does not regularize a frame, it moves it. A
    learned gain is one, the group "gain", and so are parameters that a layer names in `coordinate_parameters`, as the
    angles and decays of `RotationRNN`. Where a coordinate must stay on a manifold (`"stiefel"`), the group names it,
    "stiefel:canonical" unless asked otherwise. A `geoopt.ManifoldParameter` on a Stiefel manifold is such a one, in its
    metric. Any torch optimizer takes the other groups; these need one that moves along the manifold.

    Args:
        model: the model.
        lr: learning rate of every group that does not name its own.
        weight_decay: of the plain parameters; the optimizer's default when None.
        **per_coordinate: settings by coordinate name, `skew=dict(lr=1e-4)`, or just the learning rate, `skew=1e-4`.
            The coordinates of a composite have a prefix (`"u.skew"`); the bare name stands for all of them that have
            no entry of their own. A name that the model does not have is an error.
            `stiefel=dict(manifold="stiefel:euclidean")` chooses another metric.

    Returns:
        Groups with "params", "lr" and, for coordinates, "name", "weight_decay" and, on a manifold, "manifold"; each
        parameter stands in one.

    >>> import torch, stiefelkit as sk
    >>> layer = sk.orthogonal(nn.Linear(4, 4), "weight", "cayley")
    >>> [sorted(group) for group in parameter_groups(layer, lr=1e-3, skew=dict(lr=1e-4))]
    [['lr', 'params'], ['lr', 'name', 'params', 'weight_decay']]
    """
    check_module(model, "parameter_groups", "; sk.optim.frames takes frames without one")
    by_name: dict[tuple[str, str | None], list[nn.Parameter]] = {}
    taken: set[int] = set()

    def take(p: nn.Parameter, name: str, manifold: str | None = None) -> None:
        if id(p) not in taken:
            taken.add(id(p))
            by_name.setdefault((name, manifold), []).append(p)

    for coordinate_list in (weight.coordinate_list for weight in orthogonal_weights(model)):
        for name, c in coordinate_list.coordinates.items():
            take(c, name, coordinate_list.param.manifolds.get(name))
    for module in model.modules():
        for key, name in module.coordinate_keys().items() if isinstance(module, CoordinateParameters) else ():
            take(module.get_parameter(key), name)
    alone = {key: frame.manifold for key, frame in optimizer_hooks.frames().items() if frame.coordinate_list is None}
    for p in model.parameters():
        manifold = alone.get(id(p)) or optimizer_hooks.manifold_of(p)
        if manifold in MANIFOLDS:
            take(p, "stiefel", manifold)
    settings = {key: _settings(key, value) for key, value in per_coordinate.items()}
    present = {name for name, _ in by_name}
    for key in settings:
        if key not in present and not any(name.endswith(f".{key}") for name in present):
            raise UnknownNameError(f"The model has no coordinate {shown(key)}{did_you_mean(key, present)}")
    lr = RATE.require("parameter_groups", "learning rate", lr)
    free: dict[str, Any] = {"params": [p for p in model.parameters() if id(p) not in taken], "lr": lr}
    if weight_decay is not None:
        free["weight_decay"] = at_least(0).require("parameter_groups", "weight_decay", weight_decay)
    groups = [free] if free["params"] else []
    for (name, manifold), members in by_name.items():
        chosen = settings.get(name, settings.get(name.rpartition(".")[2], {}))
        bound = {} if manifold is None else {"manifold": manifold}
        is_bound = bool(bound) or "manifold" not in chosen
        needs(is_bound, OptionError, "parameter_groups", f"{name}= without a manifold, for it is free", chosen)
        groups.append({"params": members, "name": name, "lr": lr, "weight_decay": 0.0, **bound, **chosen})
    return groups


def geoopt_parameters(model: nn.Module, metric: str | None = None) -> list[nn.Parameter]:
    """Makes every frame that is a coordinate (`"stiefel"`) a `geoopt.ManifoldParameter`, and returns all parameters.

    geoopt's optimizers know a manifold by the class of the tensor. The frame stays in place, with its values, its
    `requires_grad` and its key in state dicts; only the parameter is a new object, so make the optimizer afterwards:

        optimizer = geoopt.optim.RiemannianAdam(sk.optim.geoopt_parameters(model), lr=1e-3)

    A second call changes nothing but the metric, "canonical" or "euclidean", that of the coordinate when None. Not
    under FSDP2, which replaces the tensors by its own, nor where the optimizers of this package do: those need no such
    parameters, and hold frames closer.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(nn.Linear(4, 4, bias=False), "weight", "stiefel")
    >>> [type(p).__name__ for p in geoopt_parameters(layer)]
    ['ManifoldParameter']
    """
    remedy = "; a frame without one is geoopt.ManifoldParameter(w, sk.manifolds.Stiefel())"
    check_module(model, "geoopt_parameters", remedy)
    found = [(w, name) for w in orthogonal_weights(model) for name in w.coordinate_list.param.manifolds]
    for weight, name in found:
        is_whole = not is_sharded(weight.coordinate_list.coordinates[name])
        words = "whole frames (the optimizers of stiefelkit.optim take sharded ones)"
        needs(is_whole, OptimizerError, "geoopt_parameters", words, f"a sharded one in {weight.qualified}")
    import geoopt

    from stiefelkit.manifolds import Stiefel

    for (*_, coordinate_list), name in found:
        c = coordinate_list.coordinates[name]
        manifold = Stiefel(metric or coordinate_list.param.manifolds[name].partition(":")[2])
        if not isinstance(c, geoopt.ManifoldParameter) or c.manifold != manifold:
            bound: Any = geoopt.ManifoldParameter
            coordinate_list.replace(name, bound(c.detach(), manifold=manifold, requires_grad=c.requires_grad))
    return list(model.parameters())


def _settings(key: str, value: Mapping[str, Any] | float) -> dict[str, Any]:
    if isinstance(value, Mapping):
        check_manifold("parameter_groups", value.get("manifold", MANIFOLDS[0]))
        has_own = not {"params", "name"} & value.keys()
        needs(has_own, OptionError, "parameter_groups", f"{key}= without params or name", value)
        settings: dict[str, Any] = as_python_number(dict(value), keep=Tensor)
        if "lr" in settings:
            settings["lr"] = RATE.require("parameter_groups", f"learning rate of {key}", settings["lr"])
        return settings
    if is_number(as_python_number(value)):
        return {"lr": RATE.require("parameter_groups", f"learning rate of {key}", value)}
    raise OptionError(f"parameter_groups needs {key}= to be a mapping or a learning rate, got {shown(value)}.")
