"""Frames as geoopt's own parameters, for its optimizers."""

from typing import Any

from torch import nn

from stiefelkit.errors import OptimizerError
from stiefelkit.tensors import is_sharded
from stiefelkit.weights.find import check_module, orthogonal_weights


def geoopt_parameters(model: nn.Module, metric: str | None = None) -> list[nn.Parameter]:
    """Makes every frame that is a coordinate (`"stiefel"`) a `geoopt.ManifoldParameter`, and returns all parameters.

    geoopt's optimizers know a manifold by the class of the tensor. The frame stays in place, with its values, its
    `requires_grad` and its key in state dicts; only the parameter is a new object, so make the optimizer afterwards:

        optimizer = geoopt.optim.RiemannianAdam(sk.optim.geoopt_parameters(model), lr=1e-3)

    A second call changes nothing but the metric. Not under FSDP2, which replaces the tensors by its own, nor where the
    optimizers of this package do: those need no such parameters, and hold frames closer. The metric is "canonical" or
    "euclidean"; that of the coordinate, canonical, when None.

    Raises:
        DtypeError: the model is no module.
        OptimizerError: a frame is sharded.
        OptionError: no metric has that name.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(nn.Linear(4, 4, bias=False), "weight", "stiefel")
    >>> [type(p).__name__ for p in geoopt_parameters(layer)]
    ['ManifoldParameter']
    """
    remedy = "; a frame without one is geoopt.ManifoldParameter(w, sk.manifolds.Stiefel())"
    check_module(model, "geoopt_parameters", remedy)
    places = [(w, name) for w in orthogonal_weights(model) for name in w.coordinate_list.param.manifolds]
    for weight, name in places:
        if is_sharded(weight.coordinate_list.coordinates[name]):
            raise OptimizerError(
                f"geoopt_parameters needs whole frames, got a sharded one in {weight.qualified}; the optimizers of "
                "stiefelkit.optim take sharded frames."
            )
    import geoopt

    from stiefelkit.manifolds import Stiefel

    for (*_, coordinate_list), name in places:
        c = coordinate_list.coordinates[name]
        coordinate_list.gradient = "exact"
        manifold = Stiefel(metric or coordinate_list.param.manifolds[name].partition(":")[2])
        if getattr(c, "manifold", None) != manifold:
            bound: Any = geoopt.ManifoldParameter
            coordinate_list.replace(name, bound(c.detach(), manifold=manifold, requires_grad=c.requires_grad))
    return list(model.parameters())
