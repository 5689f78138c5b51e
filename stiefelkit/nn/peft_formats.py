"""Tensors of PEFT's OFT, BOFT and HRA: a table of their keys, and what they are in adapters of stiefelkit."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stiefelkit.contract.param import load_chart_
from stiefelkit.errors import CheckpointError, OptionError, StiefelkitError, needs
from stiefelkit.files import checked_cast
from stiefelkit.functional import cayley, cayley_inverse, pack_skew, pack_trapezoid, unpack_skew, unpack_trapezoid
from stiefelkit.functional._householder import trapezoidal_reflectors
from stiefelkit.nn.adapter import Adapter, OrthogonalAdapter
from stiefelkit.nn.butterfly import ButterflyAdapter
from stiefelkit.nn.frozen import inside_peft, layout_of, reference_tensor, size_of
from stiefelkit.numbers import FLAG, Check, at_least, integer
from stiefelkit.parametrizations.block_diagonal import BlockDiagonal
from stiefelkit.parametrizations.cayley import Cayley
from stiefelkit.parametrizations.householder import Householder
from stiefelkit.tensors import computing_dtype
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import coordinate_list_of


class Format(NamedTuple):
    """A method of PEFT: what its tensors and the entries of its configuration are."""

    keys: Mapping[str, tuple[type[nn.Module], ...]]  # ends of the keys of tensors, and the layers that have them
    sizes: tuple[str, ...]  # entries that give all layers one size: one of them, the others are 0
    settings: Mapping[str, tuple[Any, Check]]  # the other entries that say what is computed, with PEFT's defaults


_MATRICES = (nn.Linear, nn.Conv2d)
_OFF, _DROPOUT = (False, FLAG), (0.0, at_least(0, 1))
_SERIES = {"use_cayley_neumann": (True, FLAG), "num_cayley_neumann_terms": (5, integer(1, 1000))}
_BOUND = {"coft": _OFF, "eps": (6e-5, at_least(0, most=1e6))}
FORMATS: Mapping[str, Format] = {
    "OFT": Format(
        {"oft_R.weight": _MATRICES, "oft_embedding_R.weight": (nn.Embedding,)},
        ("oft_block_size", "r"),
        {"block_share": _OFF, "module_dropout": _DROPOUT, **_BOUND, **_SERIES},
    ),
    "BOFT": Format(
        {"boft_R": _MATRICES, "boft_s": _MATRICES},
        ("boft_block_size", "boft_block_num"),
        {"boft_n_butterfly_factor": (1, integer(1)), "boft_dropout": _DROPOUT},
    ),
    "HRA": Format({"hra_u": _MATRICES}, ("r",), {"apply_GS": _OFF}),
}
"""Methods by PEFT's `peft_type`."""


def read(
    kind: str, layer: nn.Module, name: str, found: Mapping[str, Tensor], config: Mapping[str, Any]
) -> OrthogonalAdapter:
    """Returns the adapter around a layer that tensors are, by the entries of PEFT's configuration."""
    end = next(iter(found))
    side, layout, inner = _side(kind, CheckpointError, layer, end), layout_of(layer), inside_peft(layer)
    if layout is None or (layout.inputs is None) != (side == "out"):
        raise CheckpointError(f"{kind} needs a layer that {end} rotates, got {type(layer).__name__}.")
    m, inputs = size_of(inner, layout.outputs) or 0, size_of(inner, layout.inputs) or 0
    n = layer.weight[0].numel() if isinstance(layer, nn.Conv2d) else m if side == "out" else inputs
    own = reference_tensor(inner, kind).dtype
    wide = computing_dtype(own)
    for key, t in found.items():
        checked_cast(key, t, own if key == "boft_s" else wide)
    found = {key: t.to(torch.promote_types(t.dtype, wide)) for key, t in found.items()}
    options: dict[str, Any] = {"side": side, "name": name}
    if kind == "OFT":
        return _read_oft(layer, found[end], n, config, options | {"dropout": config["module_dropout"]})
    if kind == "HRA":
        u = found[end]
        _check_shape(end, u, u.dim() == 2 and u.shape[0] == n and 1 <= u.shape[1] <= n, f"({n}, r), r at most {n}")
        _check_sizes(kind, config, (u.shape[1],), n)
        v = trapezoidal_reflectors(u, config["apply_GS"])
        return _filled(OrthogonalAdapter(layer, "householder", reflections=u.shape[1], **options), pack_trapezoid(v))
    needs(len(found) == 2, CheckpointError, kind, "boft_R and boft_s", f"{end} alone")
    r, s = found["boft_R"], found["boft_s"]
    is_fit = r.dim() == 4 and r.shape[2] == r.shape[3] and r.shape[1] * r.shape[2] == n
    _check_shape("boft_R", r, is_fit, f"(m, {n} / b, b, b)")
    _check_shape("boft_s", s, s.numel() == m, f"({m}, 1)")
    _check_sizes(kind, config, (r.shape[2], r.shape[1]), n)
    asked = config["boft_n_butterfly_factor"]  # without its CUDA extension PEFT makes one
    needs(len(r) in (1, asked), CheckpointError, "It", f"{asked} factors, as boft_n_butterfly_factor says", len(r))
    sizes = {"block_size": r.shape[2], "factors": r.shape[0], "dropout": config["boft_dropout"]}
    adapter = ButterflyAdapter(layer, **sizes, **options)
    _filled(adapter, pack_skew((r.mT - r) / 2)).get_parameter("scale").copy_(s.flatten())
    return adapter


def _filled(adapter: OrthogonalAdapter, coordinates: Tensor, signs: Tensor | None = None) -> OrthogonalAdapter:
    """Gives an adapter coordinates and the signs of D, ones where there are none."""
    held = _coordinates(adapter)
    for key, ones in held.param.chart.items():
        load_chart_(held.param, {key: torch.ones_like(ones) if signs is None else signs.view(ones.shape)})
    held.fill_([coordinates.view(shape) for shape in held.param.coordinates.values()])
    is_finite = bool(_blocks(held).isfinite().all())
    needs(is_finite, CheckpointError, "It", "numbers of which the rotation is finite", "larger ones")
    return adapter


def _read_oft(layer: nn.Module, v: Tensor, n: int, config: Mapping[str, Any], options: Any) -> OrthogonalAdapter:
    b = (1 + math.isqrt(1 + 8 * v.shape[-1])) // 2 if v.dim() == 2 else 0
    k, is_shared = (n // b if b else 0), config["block_share"]
    is_fit = b * k == n and v.shape[1] == b * (b - 1) // 2 and v.shape[0] == (1 if is_shared else k)
    _check_shape("oft_R", v, is_fit, f"({n} / b, b (b - 1) / 2) for {n} features")
    _check_sizes("OFT", config, (b, k), n)
    bound = 2 * config["eps"] * math.sqrt(k if is_shared else 1) if config["coft"] else None
    adapter = OrthogonalAdapter(layer, block_size=b, shared=is_shared, bound=bound, **options)
    q = v.new_zeros(len(v), b, b)
    q[:, *torch.triu_indices(b, b, 1, device="cpu")] = v
    if not config["use_cayley_neumann"]:
        return _filled(adapter, pack_skew(q.mT))
    q = (q - q.mT).double()
    if config["coft"]:
        most = config["eps"] / math.sqrt(len(v))
        q = q / (torch.linalg.matrix_norm(q, keepdim=True) / most).clamp(min=1)
    computed = _series(q, config["num_cayley_neumann_terms"]).mT
    u, _, vh = torch.linalg.svd(computed)
    signs = torch.ones(b, dtype=q.dtype, device="cpu") if config["coft"] else None
    _filled(adapter, *cayley_inverse(u @ vh, signs))
    error = _blocks(_coordinates(adapter)).to(computed).view_as(computed) - computed
    adapter.peft_distance = math.sqrt(adapter.rotation.copies) * torch.linalg.vector_norm(error).item()
    return adapter


def _series(q: Tensor, terms: int) -> Tensor:
    """Returns what PEFT has in place of (I + Q) (I - Q)^-1: I + 2 Q + 2 Q^2 + ... with the last power once."""
    weights = {1: [1], 2: [1, 2]}.get(max(terms, 1), [1, 2, 2, *[2] * (terms - 4), 1])
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device="cpu")
    total = torch.zeros_like(q)
    for weight in reversed(weights):
        total = total @ q + weight * eye
    return total


def written(adapter: Adapter, title: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of an adapter by the ends of PEFT's keys, and the entries of PEFT's configuration."""
    who = f"save_peft at {title or 'the model itself'}"
    if not isinstance(adapter, OrthogonalAdapter):
        raise OptionError(f"{who} needs a rotation, as OFT, BOFT and HRA are, got {type(adapter).__name__}.")
    held, layer, dropout = _coordinates(adapter), adapter.base, adapter.rotation.dropout
    of_map = "HRA" if isinstance(held.param, Householder) else "OFT"
    kind = "BOFT" if isinstance(adapter, ButterflyAdapter) else of_map
    end = [*FORMATS[kind].keys][kind == "OFT" and isinstance(layer, nn.Embedding)]
    is_known, of_layer = isinstance(layer, FORMATS[kind].keys[end]), f"{kind} of {type(layer).__name__}"
    needs(is_known, OptionError, who, "a layer for which PEFT has the method", of_layer)
    side = _side(who, OptionError, layer, end)
    needs(adapter.side == side, OptionError, who, f'side="{side}" for {of_layer}', f'side="{adapter.side}"')
    if isinstance(held.param, Householder) and kind == "HRA":
        needs(not dropout, OptionError, "save_peft", "an adapter without dropout for HRA", f"dropout={dropout}")
        u = unpack_trapezoid(held.coordinates["reflectors"], held.param.shape[0], held.param.reflections, False)
        # The signs that are -1 are reflectors of single axes.
        axes = torch.eye(len(u), dtype=u.dtype, device=u.device)[:, held.param.chart["signs"] < 0]
        u = torch.cat([u, axes], dim=1)
        needs(bool(u.any(0).all()), OptionError, "save_peft", "reflectors that are not zero for HRA", "one that is")
        return {"hra_u": u}, {"peft_type": kind, "r": u.shape[1], "apply_GS": False}
    a, bound = _skew(held)
    if isinstance(adapter, ButterflyAdapter):
        s = a.new_ones(adapter.out_features) if adapter.scale is None else adapter.scale
        shape = (1, -1) if isinstance(layer, nn.Conv2d) else (-1, 1)
        entries = {"boft_n_butterfly_factor": a.shape[0], "boft_dropout": dropout}
        entries |= {"peft_type": kind, "boft_block_size": a.shape[-1], "boft_block_num": a.shape[1]}
        return {end: a.mT, "boft_s": s.reshape(shape)}, entries
    copies, b = adapter.rotation.copies, a.shape[-1]
    a = a.reshape(-1, b, b)
    entries = {key: default for key, (default, _) in FORMATS[kind].settings.items()}
    entries |= {"block_share": copies > 1, "module_dropout": dropout, "use_cayley_neumann": False}
    entries |= {"peft_type": kind, "coft": bound is not None, "oft_block_size": b, "r": len(a) * copies}
    if bound is not None:
        # The shortest number that is loaded as the same bound, whatever the number of blocks.
        root = math.sqrt(len(a))
        near = [float(f"{bound / 2 * root:.{digits}g}") for digits in range(1, 18)]
        entries["eps"] = next((eps for eps in near if 2 * eps / root == bound), near[-1])
    return {end: a.mT[:, *torch.triu_indices(b, b, 1, device="cpu")]}, entries


def _coordinates(adapter: OrthogonalAdapter) -> CoordinateList:
    held = coordinate_list_of(adapter.rotation, "weight")
    if held is None or len(held) > 1:
        raise OptionError("save_peft needs a rotation with coordinates, got a baked or further parametrized one.")
    return held


def _skew(held: CoordinateList) -> tuple[Tensor, float | None]:
    """Returns A of all blocks' Cayley transforms (I + A)^-1 (I - A), and the bound of each block, if there is one."""
    inner = held.param.inner if isinstance(held.param, BlockDiagonal) else held.param
    b = inner.shape[-1]
    if type(inner) is Cayley and bool((inner.signs == 1).all()) and inner.bandwidth is None:
        return unpack_skew(held.skew, b, b, False)[0], inner.bound
    w = _blocks(held)
    v = cayley_inverse(w.double(), torch.ones(b, dtype=torch.float64, device=w.device))[0].to(w.dtype)
    is_near = bool(torch.dist(cayley(v, b, b), w) <= 64 * torch.finfo(w.dtype).eps * math.sqrt(w.shape[-3:].numel()))
    needs(is_near, OptionError, "save_peft", "rotations without the eigenvalue -1", "another or a reflection")
    return unpack_skew(v, b, b, False)[0], None


def _blocks(held: CoordinateList) -> Tensor:
    inner = held.param.inner if isinstance(held.param, BlockDiagonal) else held.param
    w = inner(*held.coordinates.values())
    return w if w.dim() > 2 else w.unsqueeze(0)


def _side(who: str, error: type[StiefelkitError], layer: nn.Module, end: str) -> str:
    """Returns the side that PEFT rotates; raises an error for a convolution that it does not compute as changed."""
    if not isinstance(layer, nn.Conv2d):
        return "out" if end.startswith("oft_embedding") else "in"
    geometry: list[Any] = [layer.kernel_size, layer.stride, layer.padding]
    is_square = all(isinstance(s, tuple) and s[0] == s[1] for s in geometry)
    is_plain = (layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), 1, "zeros")
    wanted = "a square kernel, stride and padding by zeros of a Conv2d, without dilation and groups"
    needs(is_square and is_plain, error, who, wanted, "another")
    is_point = end != "oft_R.weight" or layer.kernel_size == (1, 1)  # else PEFT's forward differs from what it merges
    needs(is_point, error, who, "a Conv2d of kernel 1 x 1 for OFT", f"{layer.kernel_size}")
    return "patches"


def _check_sizes(kind: str, config: Mapping[str, Any], sizes: tuple[int, ...], n: int) -> None:
    """Raises CheckpointError for a size of tensors of n features that is not the one that PEFT makes of its entry."""
    for key, size in zip(FORMATS[kind].sizes, sizes, strict=True):
        asked = config[key] or size
        if kind == "OFT" and asked != size:
            asked = min((b for b in range(1, n + 1) if n % b == 0), key=lambda b: abs(b - asked))
        needs(asked == size, CheckpointError, "It", f"tensors of {key}={config[key]}, for {n} features", size)


def _check_shape(end: str, value: Tensor, is_fit: bool, wanted: str) -> None:
    needs(is_fit, CheckpointError, "It", f"{end} of shape {wanted}", tuple(value.shape))
