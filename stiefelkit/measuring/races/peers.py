"""The peers: other implementations of the same maps, each under the family that it is compared with.

A plugin enters a peer of its own map by an entry point of the group `stiefelkit.peers` that gives a `Contender`.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from stiefelkit.errors import DtypeError, OptionError, PluginError
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.contenders import LEARNING_RATE, Contender, Entry, FrameProblem, Holder
from stiefelkit.registry import Registry

LARGEST_LOOP = 1 << 31
"""Bytes that the layers of `layer_loop` may keep for their backward."""


def _plain(weight: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Entry:
    return Entry(weight, parameters, torch.optim.SGD(parameters, lr=LEARNING_RATE))


def _function(compute: Callable[..., Tensor], *parameters: Tensor) -> Entry:
    """Enters a bare function of leaf tensors, with torch's autograd behind it."""
    leaves = [parameter.requires_grad_() for parameter in parameters]
    return _plain(lambda: compute(*leaves), leaves)


def _filled(layer: nn.Module, x: Tensor) -> Entry:
    """Enters a module with one parametrized weight, whose tensor is set to X."""
    coordinate_list = cast(Any, layer).parametrizations.weight
    with torch.no_grad():
        coordinate_list.original.copy_(x)
    return _plain(lambda: cast(Tensor, layer.weight), [coordinate_list.original])


def _skew(x: Tensor) -> Tensor:
    """Returns A = L - L^H, L the lower trapezoid of X, filled up with zeros to n x n."""
    square = F.pad(x.tril(), (0, x.shape[-2] - x.shape[-1]))
    return square - square.mH


def _solve(x: Tensor) -> Tensor:
    a = _skew(x)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve(eye + a, eye - a)[..., : x.shape[-1]]


def _matrix_exp(x: Tensor) -> Tensor:
    return torch.matrix_exp(_skew(x))[..., : x.shape[-1]]


def _torch_orthogonal(name: str, based: bool, problem: FrameProblem) -> Entry:
    """Enters torch.nn.utils.parametrizations.orthogonal; `based` is its trivialization, a product with a base."""
    if name == "householder":
        x = _reflectors(problem, problem.p) + torch.eye(problem.n, problem.p, dtype=problem.dtype).to(problem.device)
        count = problem.options.get("reflections", problem.p)
        if count != problem.p:
            raise OptionError(f"torch's Householder map needs as many reflectors as columns, got {count}.")
    else:
        # torch's Cayley map takes A / 2
        x = problem.tangent() * (2 if name == "cayley" else 1)
    layer = parametrizations.orthogonal(Holder(problem.frame()), "weight", name, use_trivialization=based)
    return _filled(layer, x)


def _geotorch(trivialization: str, problem: FrameProblem) -> Entry:
    import geotorch  # pyright: ignore[reportMissingImports]

    if problem.dtype.is_complex:
        raise DtypeError(f"geotorch needs a real dtype, got {problem.dtype}.")
    layer = Holder(problem.frame())
    manifold = (geotorch.SO if problem.n == problem.p else geotorch.Stiefel)(problem.shape, triv=trivialization)
    parametrize.register_parametrization(layer, "weight", manifold.to(layer.weight), unsafe=True)
    # geotorch's Cayley map takes A / 2 as well
    return _filled(layer, problem.tangent() * (2 if trivialization == "cayley" else 1))


def _householder_product(problem: FrameProblem) -> Entry:
    """Enters p columns of a product of reflectors whose leading entry is 1, so that tau is a function of them."""
    p = problem.p

    def compute(x: Tensor) -> Tensor:
        below = x.tril(-1)
        tau = 2 / (1 + below.square().sum(-2))
        return torch.linalg.householder_product(F.pad(below, (0, p - below.shape[-1])), tau)

    return _function(compute, _reflectors(problem, problem.options.get("reflections", p)))


def _reflectors(problem: FrameProblem, count: int) -> Tensor:
    if problem.dtype.is_complex:
        raise DtypeError(f"torch's Householder maps need a real dtype, got {problem.dtype}.")
    return problem.normal(*problem.lead, problem.n, count).tril(-1)


def _layer_loop(problem: FrameProblem) -> Entry:
    """Enters rotations of neighbouring wires, one layer after the other on an n x p matrix, with autograd.

    Layer l rotates the pairs (i, i + 1) with i = l mod 2, l mod 2 + 2, ...; a complex one turns the phase of wire i
    first, and phases of all wires follow the last layer.
    """
    if problem.options.get("layout", "brickwall") != "brickwall":
        raise OptionError(f"layer_loop needs the layout brickwall, got {problem.options['layout']!r}.")
    n, layers = problem.n, problem.options.get("layers") or problem.n
    size = layers * math.prod(problem.shape) * problem.dtype.itemsize
    if size > LARGEST_LOOP:
        raise OptionError(
            f"layer_loop keeps a matrix for each layer and needs at most 2 GiB for them, got {size:.2g} B."
        )
    counts = [(n - layer % 2) // 2 for layer in range(layers)]
    angles = [problem.angles(*problem.lead, sum(counts)).to(problem.dtype.to_real())]
    if problem.dtype.is_complex:
        angles += [problem.angles(*problem.lead, size).to(angles[0].dtype) for size in (sum(counts), n)]
    start = torch.eye(n, problem.p, dtype=problem.dtype, device=problem.device).expand(problem.shape)

    def compute(theta: Tensor, phi: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        w = start
        cosines, sines = theta.cos().split(counts, -1), theta.sin().split(counts, -1)
        turns = [None] * layers if phi is None else torch.exp(1j * phi).split(counts, -1)
        for layer, (c, s, turn) in enumerate(zip(cosines, sines, turns, strict=True)):
            first, pairs = layer % 2, c.shape[-1]
            c, s = c.unsqueeze(-1), s.unsqueeze(-1)
            upper, lower = (w[..., first + i : first + i + 2 * pairs - 1 : 2, :] for i in (0, 1))
            if turn is not None:
                upper = upper * turn.unsqueeze(-1)
            turned = torch.stack([c * upper - s * lower, s * upper + c * lower], dim=-2).flatten(-3, -2)
            w = torch.cat([w[..., :first, :], turned, w[..., first + 2 * pairs :, :]], dim=-2)
        return w if last is None else torch.exp(1j * last).unsqueeze(-1) * w

    return _function(compute, *angles)


def _geoopt(optimizer: str, problem: FrameProblem) -> Entry:
    """Enters the frame itself, moved by geoopt's Riemannian SGD: along the Cayley map if canonical, else by QR."""
    if problem.dtype.is_complex:
        raise DtypeError(f"geoopt's Stiefel manifold needs a real dtype, got {problem.dtype}.")
    moved = peer_optimizers.get(optimizer).make(problem.frame(), LEARNING_RATE)
    return Entry(lambda: moved.frame, [moved.frame], moved.optimizer)


peers = Registry(
    "stiefelkit.peers",
    "peer",
    {
        "torch_solve": Contender("cayley", lambda problem: _function(_solve, problem.tangent())),
        "torch_orthogonal_cayley": Contender("cayley", partial(_torch_orthogonal, "cayley", False)),
        "torch_orthogonal_cayley_base": Contender("cayley", partial(_torch_orthogonal, "cayley", True)),
        "geotorch_cayley": Contender("cayley", partial(_geotorch, "cayley"), package="geotorch"),
        "torch_householder_product": Contender("householder", _householder_product),
        "torch_orthogonal_householder": Contender("householder", partial(_torch_orthogonal, "householder", False)),
        "torch_orthogonal_householder_base": Contender("householder", partial(_torch_orthogonal, "householder", True)),
        "torch_matrix_exp": Contender("matrix_exp", lambda problem: _function(_matrix_exp, problem.tangent())),
        "torch_orthogonal_matrix_exp": Contender("matrix_exp", partial(_torch_orthogonal, "matrix_exp", False)),
        "torch_orthogonal_matrix_exp_base": Contender("matrix_exp", partial(_torch_orthogonal, "matrix_exp", True)),
        "geotorch_matrix_exp": Contender("matrix_exp", partial(_geotorch, "expm"), package="geotorch"),
        "layer_loop": Contender("givens", _layer_loop),
        "geoopt_canonical": Contender("stiefel", partial(_geoopt, "geoopt_sgd_canonical"), ("step",), "geoopt"),
        "geoopt_euclidean": Contender("stiefel", partial(_geoopt, "geoopt_sgd_euclidean"), ("step",), "geoopt"),
    },
)
"""Name to contender; its family says with whom it is compared."""


def missing_packages(contenders: Mapping[str, Contender]) -> dict[str, list[str]]:
    """Returns package to contenders that need it, of those not installed; raises PluginError for no `Contender`."""
    missing: dict[str, list[str]] = {}
    for name, contender in contenders.items():
        if not isinstance(contender, Contender):
            raise PluginError(f"The peer {name!r} needs to be a Contender, got {contender!r}.")
        if contender.package and importlib.util.find_spec(contender.package) is None:
            missing.setdefault(contender.package, []).append(name)
    return missing
