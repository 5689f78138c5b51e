"""Rotations that are folded into the linear layers around them, as quantization of language models wants."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stiefelkit._torch import call_hooks, held_modules, held_parameters
from stiefelkit.errors import DtypeError, NotAFrameError, OptionError, ShapeError, UnfilledError
from stiefelkit.metrics import frame_tolerance, orthogonality_error
from stiefelkit.nn.adapter import OrthogonalAdapter
from stiefelkit.nn.probing import agree, has_own_forward, in_other_adapters, probes, twin
from stiefelkit.tensors import working_dtype

__all__ = ["rotate_"]


class _Role(NamedTuple):
    """A way in which a tensor changes: R times its columns, its rows times a norm's scale, its rows times R^T."""

    writes: bool = False
    reads: bool = False
    norm: int | None = None

    def __str__(self) -> str:
        scale, turn = " diag(g)" if self.norm is not None else "", " R^T" if self.reads else ""
        return f"{'R ' if self.writes else ''}W{scale}{turn}"


class _Site(NamedTuple):
    """A layer on h: whether it reads h, through which norm, and whether it adds to h."""

    layer: nn.Module
    reads: bool
    writes: bool
    norm: nn.Module | None


class _Scale(NamedTuple):
    """The scale of a norm: the parameter that holds it, its values, and what the parameter holds for none."""

    parameter: nn.Parameter
    values: Tensor
    neutral: float


@torch.no_grad()
def rotate_(
    rotation: Tensor,
    *,
    readers: Iterable[nn.Module] = (),
    writers: Iterable[nn.Module] = (),
    norms: Mapping[nn.Module, Iterable[nn.Module]] | None = None,
    model: nn.Module | None = None,
) -> None:
    """Folds a rotation R of features h into the layers around them: what they write and read is R h from then on.

    Writers, whose outputs are added up to h, get R W and R b, readers W R^T, and what does both R W R^T and R b: the
    function of the whole is the same, but for rounding. A norm between them must commute with R, as a root mean square
    does; its scale is folded into those that read it, `norms={norm: readers}`, and is one from then on. Each tensor is
    worked out once, in float64, and rounded once; nothing is written before all of it was checked. With R of
    `sk.orthogonal(layer, "weight", "stiefel")` that is layer.weight.

    Args:
        rotation: R, n x n.
        readers: linear layers with n inputs.
        writers: linear layers with n outputs; or embeddings, whose rows are rotated.
        norms: norms of n features, each with all layers that read what it gives, which are readers by that.
        model: the model of all these. If it is given, three things are looked for that were forgotten, and refused:
            another norm of n features that does not commute with R, another layer that shares a weight with these, and
            an adapter around one of these. A layer that was left out, and a parameter added to h, are not seen.

    Raises:
        ShapeError: R is not square, or a layer has another size.
        NotAFrameError: R is not orthogonal.
        UnfilledError: a weight is on the meta device.
        DtypeError: a layer is neither linear nor, among the writers, an embedding; or its weight is no plain parameter.
        OptionError: layers share a weight and want different changes of it; a norm is no root mean square with a
            scale; a layer has hooks, or its own forward does not commute with R.

    >>> first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    >>> x = torch.randn(5, 3)
    >>> before = last(first(x))
    >>> rotate_(torch.eye(4).flip(0), readers=[last], writers=[first])
    >>> torch.allclose(last(first(x)), before, atol=1e-6)
    True
    """
    if rotation.dim() != 2 or rotation.shape[0] != rotation.shape[1]:
        raise ShapeError(f"rotate_ needs a square matrix, got shape {tuple(rotation.shape)}.")
    n, error = len(rotation), orthogonality_error(rotation).item()
    if not error <= frame_tolerance(n, rotation.dtype):
        raise NotAFrameError(
            f"rotate_ needs an orthogonal matrix, got one with ||R^H R - I||_F = {error:.2g}; "
            "sk.functional.nearest_frame gives the nearest."
        )
    r = rotation.detach().to(working_dtype(rotation.dtype))
    if norms is not None and not isinstance(norms, Mapping):
        raise OptionError(f"rotate_ needs norms= as a mapping, norm: its readers, got {type(norms).__name__}.")
    norms = {norm: list(read) for norm, read in (norms or {}).items()}
    scales = {id(norm): scale for norm in norms if (scale := _scale(norm, r)) is not None}
    sites = _sites(list(readers), list(writers), norms)
    changed: dict[Any, tuple[Tensor, Tensor]] = {}
    roles: dict[Any, tuple[_Role, nn.Module]] = {}
    for module in [*norms, *(site.layer for site in sites)]:
        if any(call_hooks(module)):
            raise OptionError(
                f"rotate_ needs layers and norms without hooks, which may do more, got {_kind(module)} with hooks; "
                "remove them first."
            )
    for site in sites:
        values = {}
        for name, (tensor, role) in _roles(site, n, scales).items():
            key = (tensor.device, tensor.data_ptr())
            known, other = roles.setdefault(key, (role, site.layer))
            if known != role or (key in changed and changed[key][0].shape != tensor.shape):
                raise OptionError(
                    f"rotate_ needs one change of a weight that layers share, got {_kind(other)}, which needs {known}, "
                    f"and {_kind(site.layer)}, which needs {role}; untie them first: layer.{name} = "
                    f"torch.nn.Parameter(layer.{name}.clone())."
                )
            if key not in changed:
                scale = None if role.norm is None else scales[role.norm].values
                changed[key] = tensor, _changed(tensor, role, scale, r)
            values[name] = changed[key][1]
        if has_own_forward(site.layer):
            _check_own_forward(site, values, scales, r)
    if model is not None:
        _check_model(model, sites, norms, {tensor.data_ptr() for tensor, _ in changed.values()}, r)
    for tensor, value in changed.values():
        tensor.copy_(value)
    for scale in scales.values():
        scale.parameter.fill_(scale.neutral)


def _sites(
    readers: list[nn.Module], writers: list[nn.Module], norms: Mapping[nn.Module, list[nn.Module]]
) -> list[_Site]:
    """Returns what each layer does, each once."""
    behind: dict[int, nn.Module] = {}
    for norm, read in norms.items():
        for layer in read:
            if behind.setdefault(id(layer), norm) is not norm:
                raise OptionError(f"rotate_ needs one norm in front of a layer, got {_kind(layer)} behind two.")
    reading = [*readers, *(layer for read in norms.values() for layer in read)]
    reads, writes = {id(layer) for layer in reading}, {id(layer) for layer in writers}
    each = {id(layer): layer for layer in [*reading, *writers]}
    return [_Site(layer, key in reads, key in writes, behind.get(key)) for key, layer in each.items()]


def _roles(site: _Site, n: int, scales: Mapping[int, _Scale]) -> dict[str, tuple[nn.Parameter, _Role]]:
    """Returns the tensors of a layer by name, and how each changes."""
    layer, norm = site.layer, id(site.norm) if id(site.norm) in scales else None
    is_embedding = isinstance(layer, nn.Embedding) and not site.reads
    if is_embedding:
        role = _Role(reads=True)  # what it writes are rows
    else:
        role = _Role(site.writes, site.reads, norm)
    w = held_parameters(layer).get("weight") if is_embedding or isinstance(layer, nn.Linear) else None
    if w is None:
        names = "Linear" if site.reads else "Linear or Embedding"
        remedy = "; norms={norm: readers} folds its scale" if _is_norm(layer, n) else ""
        raise DtypeError(
            f"rotate_ needs layers of torch.nn.{names} with plain weights, got {type(layer).__name__}{remedy}."
        )
    if w.is_meta:
        raise UnfilledError(f"rotate_ needs weights that hold values, got {_kind(layer)} on the meta device.")
    for dim, is_rotated in enumerate((role.writes, role.reads)):
        if is_rotated and w.shape[dim] != n:
            raise ShapeError(f"rotate_ needs weights with {n} features along dimension {dim}, got {tuple(w.shape)}.")
    bias = held_parameters(layer).get("bias")
    return {"weight": (w, role)} | ({} if bias is None else {"bias": (bias, _Role(writes=site.writes))})


def _changed(tensor: Tensor, role: _Role, scale: Tensor | None, r: Tensor) -> Tensor:
    """Returns R W diag(g) R^T with the factors that a role has, in float64."""
    wide, r = tensor.to(working_dtype(tensor.dtype)), r.to(tensor.device)
    if scale is not None:
        wide = wide * scale
    if role.reads:
        wide = wide @ r.mH
    return r @ wide if role.writes else wide


def _scale(norm: nn.Module, r: Tensor) -> _Scale | None:
    """Returns the scale of a norm that commutes with R but for it; None if it commutes as it is.

    Raises:
        OptionError: it does not, or has a bias.
    """
    if _commutes(norm, r):
        return None
    parameter, x = held_parameters(norm).get("weight"), probes(len(r), r.device)
    if parameter is not None and parameter.shape == (len(r),):
        w = parameter.double()
        for neutral, values in ((1.0, w), (0.0, 1 + w)):
            bare = twin(norm, weight=torch.full_like(w, neutral))
            if _commutes(bare, r) and agree(bare(x.to(w.device)) * values, twin(norm)(x.to(w.device)), len(r)):
                return _Scale(parameter, values, neutral)
    raise OptionError(
        f"rotate_ needs norms that are a root mean square and a scale, which commutes with R, got {_kind(norm)}."
    )


def _commutes(norm: nn.Module, r: Tensor) -> bool:
    """Returns whether a norm gives R y for R x where it gives y for x."""
    device = next((p.device for p in norm.parameters()), r.device)
    x, r, other = probes(len(r), device), r.to(device, torch.float64), twin(norm)
    return agree(other(x @ r.mT), other(x) @ r.mT, len(r))


def _check_own_forward(site: _Site, values: dict[str, Tensor], scales: Mapping[int, _Scale], r: Tensor) -> None:
    """Raises OptionError unless a layer with a forward of its own does with new values what it did, but for R."""
    layer, n = site.layer, len(r)
    w: Any = held_parameters(layer)["weight"]
    if isinstance(layer, nn.Embedding):
        x = before = torch.arange(min(len(w), 8), device=w.device)
    else:
        x = before = probes(w.shape[1], w.device)
    if site.reads:
        scale = scales.get(id(site.norm))
        x = x @ r.mT.to(x)
        before = before if scale is None else before * scale.values
    try:
        y, rotated = twin(layer)(before), twin(layer, **values)(x)
    except Exception as cause:  # whatever a stranger's forward raises; one put on the instance runs the layer itself
        raise OptionError(
            f"rotate_ needs layers of which a copy runs in float64, got {_kind(layer)}, which raises "
            f"{type(cause).__name__}."
        ) from cause
    if not agree(rotated, y @ r.mT.to(y) if site.writes else y, max(n, w.shape[1])):
        raise OptionError(f"rotate_ needs layers that compute W x + b, got {_kind(layer)}, whose forward does more.")


def _check_model(
    model: nn.Module,
    sites: list[_Site],
    norms: Mapping[nn.Module, Any],
    changed: set[int],
    r: Tensor,
) -> None:
    """Raises OptionError for what stands on h in a model and was not named."""
    named = {id(site.layer) for site in sites} | {id(norm) for norm in norms}
    others = in_other_adapters(model)
    others |= {id(a.layer): "OrthogonalAdapter" for a in model.modules() if isinstance(a, OrthogonalAdapter)}
    for name, module in model.named_modules():
        if id(module) in named:
            if id(module) in others:
                raise OptionError(
                    f"rotate_ needs layers that nothing else adds to, got {name} inside {others[id(module)]}; "
                    "fold or merge_and_unload it first."
                )
            continue
        for parameter in held_parameters(module).values():
            if parameter is not None and parameter.data_ptr() in changed:
                raise OptionError(f"rotate_ needs all layers that share a weight, got {name} left out, which reads it.")
        if _is_norm(module, len(r)) and not _commutes(module, r):
            raise OptionError(
                f"rotate_ needs norms that commute with R, got {name}, {_kind(module)}, left out; norms={{norm: "
                "readers}} folds a scale into what reads it."
            )


def _is_norm(module: nn.Module, n: int) -> bool:
    """Returns whether a module without others inside acts on n features one by one, by what it holds."""
    if held_modules(module) or isinstance(module, nn.Linear | nn.Embedding):
        return False
    weight = held_parameters(module).get("weight")
    return (weight is not None and weight.shape == (n,)) or getattr(module, "normalized_shape", None) == (n,)


def _kind(module: nn.Module) -> str:
    return type(module).__name__
