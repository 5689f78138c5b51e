"""Compares what a model computes before and after a rotation, in float64, and names the layer that differs first."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from stiefelkit._torch import TorchDispatchMode, held_modules, held_parameters, is_writing_operator
from stiefelkit.errors import OptionError, needs
from stiefelkit.nn import folding
from stiefelkit.nn.adapter import replaced
from stiefelkit.nn.folding import Affine, Site
from stiefelkit.nn.frozen import agree, attribute
from stiefelkit.nn.linear import HadamardLinear

Turn = Callable[[Tensor], Tensor]
_KEPT = 2**27  # entries of new weights that are not worked out again at each read


_Call: TypeAlias = tuple[str, str, Tensor | None, Tensor | None]  # the names of a layer and its class, input, output


class _InFloat64(TorchDispatchMode):
    """Works in float64 whatever the dtype of weights is, and whatever the model casts to."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        written = args[0] if is_writing_operator(func) and args and isinstance(args[0], Tensor) else None
        dtype = written.dtype if written is not None and written.is_floating_point() else torch.float64

        def cast(x: object) -> object:
            if isinstance(x, Tensor):
                return x.to(dtype) if x.is_floating_point() and x is not written else x
            if isinstance(x, torch.dtype):
                return dtype if x.is_floating_point else x
            return type(x)(map(cast, x)) if type(x) in (list, tuple) else x  # type: ignore[call-arg,arg-type]

        return func(*map(cast, args), **{key: cast(x) for key, x in (kwargs or {}).items()})


def copied(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """Returns a copy with the same parameters, not in training, and what stands for each module by its id.

    It computes attention and experts by plain products, since other kernels have no float64.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    try:
        other = copy.deepcopy(model, memo).eval()
    except Exception as error:  # whatever a stranger's module raises
        got = f"{type(model).__name__}, which raises {type(error).__name__}; check=False rotates it unseen"
        raise OptionError(f"Folding needs a model that can be copied, got {got}.") from error
    for name in ("set_attn_implementation", "set_experts_implementation"):
        with contextlib.suppress(Exception):  # of a model that has no choice
            attribute(other, name)("eager")
    return other, memo


def _run(model: nn.Module, probe: "Probe") -> list[Tensor]:
    """Returns what a copy gives, in float64; random numbers and modes stay as they were."""
    devices = {p.device for p in model.parameters()}
    random = torch.random.fork_rng([d for d in devices if d.type == "cuda"])
    autocast = torch.autocast(next((d.type for d in devices if d.type != "cpu"), "cpu"), enabled=False)
    with torch.no_grad(), random, autocast, torch.compiler.set_stance("force_eager"), _InFloat64():
        return probe.run(model)


def _logits(found: Tensor | Iterable[object]) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found.detach().clone()]
    named = found.items() if isinstance(found, Mapping) else enumerate(found)
    tensors = [(str(key), t) for key, t in named if isinstance(t, Tensor) and t.is_floating_point()]
    logits = [t for key, t in tensors if "logits" in key] or [t for _, t in tensors[:1]]
    return [t.detach().clone() for t in logits]


class Probe(NamedTuple):
    """A run of a model, which gives logits."""

    on: str
    run: Callable[[nn.Module], list[Tensor]]
    is_wanted: bool = False  # whether a model that does not run so is refused


def own_probes(model: nn.Module, writers: Sequence[nn.Module], n: int, inputs: Mapping[str, Any] | None) -> list[Probe]:
    """Returns runs of a model on inputs that are given, or images, and on tokens, in two steps and at once."""
    known = inspect.signature(model.forward).parameters
    find = attribute(model, "get_input_embeddings")
    first = [find()] if callable(find) and not isinstance(writers[0], nn.Embedding) else []  # if it was left out
    tables = [m for m in (*first, *writers) if isinstance(m, nn.Embedding)]
    probes = [] if inputs is None else [Probe("the inputs given", lambda m: _logits(m(**inputs)), True)]
    if not tables:
        return probes
    count, like = min([8, *(t.num_embeddings for t in tables[1:])]), tables[0].weight
    config = attribute(model, "config")
    known_tokens = [vars(c) for c in (config, attribute(config, "text_config")) if c is not None]
    special = {i for held in known_tokens for key, i in held.items() if "token" in key and type(i) is int}
    words = torch.tensor([i for i in range(min(len(like), 4096)) if i not in special] or [0], device="cpu")
    ids = words.repeat(count)[None, :count].to(like.device)
    probes.append(Probe("tokens", lambda m: _logits(m(ids))))
    cache = next((key for key in ("cache", "past_key_values") if key in known), None)
    if cache is not None:

        def in_steps(m: nn.Module) -> list[Tensor]:
            first = m(ids[:, : count // 2], use_cache=True)
            held = {cache: attribute(first, "past_key_values", "cache")}
            return [*_logits(first), *_logits(m(ids[:, count // 2 :], **held))]

        probes.insert(len(probes) - 1, Probe("tokens in two steps", in_steps))
    senses = [key for key in ("vision_config", "audio_config") if attribute(config, key) is not None]
    if inputs is None and senses:
        probes.insert(0, Probe(f"images (of {senses[-1]})", _of_images(config, ids, n, like), True))
    return probes


def _of_images(config: Any, ids: Tensor, n: int, like: Tensor) -> Callable[[nn.Module], list[Tensor]]:
    vision, token = attribute(config, "vision_config"), attribute(config, "image_token_id", "image_token_index")
    size = attribute(vision, "image_size", default=32)
    shape = (attribute(vision, "num_channels", default=3), *(size if isinstance(size, list | tuple) else (size, size)))
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0), device="cpu").to(like)

    def run(m: nn.Module) -> list[Tensor]:
        find: Any = attribute(m, "get_image_features")
        for pixels in (x, x[None]):  # images, or images of each text
            with contextlib.suppress(Exception):  # of a model that takes the others
                found = find(pixel_values=pixels)
                found = attribute(found, "pooler_output", default=found)
                rows = sum(t.numel() // n for t in ([found] if isinstance(found, Tensor) else found))
                marked = torch.cat([ids[:, :2], torch.full_like(ids[:, :1], token).expand(-1, rows), ids[:, 2:]], 1)
                return _logits(m(input_ids=marked, pixel_values=pixels))
        raise NotImplementedError

    return run


def writers_beside(
    model: nn.Module, base: nn.Module, writers: Sequence[nn.Module], n: int, inputs: Mapping[str, Any] | None
) -> list[nn.Module]:
    """Returns layers outside of a base model whose outputs it reads as embeddings: of images, and soft prompts."""
    inside = set(map(id, base.modules()))
    beside = [m for m in model.modules() if attribute(m, "embedding_dim", "out_features") == n and id(m) not in inside]
    if not beside or any(p.is_meta for p in model.parameters()):
        return []
    (other, memo), read, given = copied(model), list[Any](), [list[Tensor]() for _ in beside]
    memo[id(base)].register_forward_pre_hook(
        lambda _, __, given: read.append(given.get("inputs_embeds")), with_kwargs=True
    )
    for m, rows in zip(beside, given, strict=True):
        memo[id(m)].register_forward_hook(lambda _, __, y, rows=rows: rows.append(y))
        rows += [m.weight] if isinstance(m, nn.Embedding) and m.weight.numel() < 2**20 else []  # some read it uncalled
    for _ in results(other, own_probes(model, writers, n, inputs), "rotation_sites"):
        pass
    found = _directions([x for x in read if x is not None], n)
    each = [(found @ _directions(rows, n).mT).abs() > 1 - 1e-6 for rows in given]
    return [m for m, is_parallel in zip(beside, each, strict=True) if bool(is_parallel.any())]


def _directions(found: list[Tensor], n: int) -> Tensor:
    """Returns rows of n features with the norm one, so that an inner product of one says that they are parallel."""
    rows = torch.cat(
        [torch.zeros(0, n, device="cpu"), *(t.detach().reshape(-1, n).to("cpu", torch.float64) for t in found)]
    )
    return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=1e-30)


def results(model: nn.Module, probes: Iterable[Probe], who: str) -> Iterator[tuple[Probe, list[Tensor]]]:
    """Yields the probes that a copy of a model takes, with what it gives."""
    count, last = 0, "none of them"
    for probe in probes:
        try:
            found = _run(model, probe)
        except Exception as error:  # whatever a stranger's forward raises
            last = f"{type(model).__name__}, which raises {type(error).__name__}"
            wanted = f"a model that runs on {probe.on} in float64, or inputs= of its processor in rotation_sites"
            needs(not probe.is_wanted, OptionError, who, wanted, last)
            continue
        is_finite = all(bool(y.isfinite().all()) for y in found)
        needs(is_finite, OptionError, who, "finite outputs", f"others of {type(model).__name__} on {probe.on}")
        count += 1
        yield probe, found
    needs(count > 0, OptionError, who, "a model that runs on tokens in float64, or inputs= in its sites", last)


def require_same(
    model: nn.Module,
    changed: nn.Module,
    probes: Sequence[Probe],
    turn: Turn,
    roles: Mapping[str, str],
    who: str,
    error: float,
) -> None:
    """Raises OptionError, naming the layer that it is from, if a changed copy gives other outputs than a model.

    `turn` is what happens to rows of the stream, `roles` has the names of layers that are listed, each with "norm",
    "reader", "writer" or "value", and `error` is by how much the rotation is off an orthogonal matrix.
    """
    plain, _ = copied(model)
    for probe, before in results(plain, probes, who):
        after = _run(changed, probe)
        off = [float(torch.dist(b, a) / b.norm().clamp(min=1e-30)) for b, a in zip(before, after, strict=True)]
        if all(far <= 1e-6 + 100 * error for far in off):  # which NaN is not
            continue
        found = _culprit(_recorded(plain, plain, probe), _recorded(changed, plain, probe), turn, roles)
        got = f"{max(off):.1e} off on {probe.on}: {found}; check=False folds all the same"
        raise OptionError(f"{who} needs sites that leave the outputs of {type(model).__name__} equal, got {got}.")


def _recorded(model: nn.Module, like: nn.Module, probe: Probe) -> list[_Call]:
    """Returns the calls of layers of a model, those that have none inside in another one like it."""
    calls: list[_Call] = []

    def record(name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], y: object) -> None:
        parts = [*args, *kwargs.values()], (y if isinstance(y, tuple) else [y])
        x, y = (next((t for t in part if isinstance(t, Tensor)), None) for part in parts)
        calls.append((name, type(module).__name__, x, y))

    for name, leaf in like.named_modules():
        if not held_modules(leaf):
            model.get_submodule(name).register_forward_hook(functools.partial(record, name), with_kwargs=True)
    _run(model, probe)
    return calls


def _culprit(before: list[_Call], after: list[_Call], turn: Turn, roles: Mapping[str, str]) -> str:
    """Returns the sentence that names what writes or reads the stream and was not rotated, as far as calls tell."""
    behind, beside = set[int](), dict[int, str]()
    for (name, kind, x, y), (*_, new_x, new_y) in zip(before, after, strict=False):
        named, role = f"{name}, {kind},", roles.get(name)
        of_x, of_y = _relation(x, new_x, turn), _relation(y, new_y, turn)
        if role == "norm" and x is not None and y is not None:
            behind.add(y.data_ptr())
            if of_x == "same":
                return f"{named} is among the norms and does not read the stream"
            if of_x == "other":
                what = beside.get(x.shape[-1], "what no layer computes")
                return f"{what} writes to the stream in front of {name} and is not among the writers"
        elif role == "writer" and of_y in ("same", "other"):
            cause = "reads what its layers did not write, as values of a prefix in a cache"
            return f"{named} {cause if of_x == 'other' else 'writes to the stream what is not turned'}"
        elif role == "reader" and of_y == "other":
            return f"{named} does not read the norm that it is listed behind, or reads another beside"
        elif role is None and of_y == "other" and (of_x == "turned" or (x is not None and x.data_ptr() in behind)):
            remedy = "; norms={norm: readers} folds its scale, but not that of a norm of what is added to the stream"
            return f"{named} reads the stream and is not among the readers{remedy if 'Norm' in kind else ''}"
        elif role is None and of_y == "same" and y is not None:
            beside[y.shape[-1]] = named
    return "no layer tells where"


def _relation(x: Tensor | None, y: Tensor | None, turn: Turn) -> str:
    if x is None or y is None or x.shape != y.shape or not x.is_floating_point():
        return "unknown"
    with contextlib.suppress(Exception):  # of another size than the stream's
        if agree(y, turn(x.double()), x.shape[-1]):
            return "turned"
    return "same" if agree(y, x, x.shape[-1]) else "other"


def changed_copy(
    model: nn.Module,
    sites: Iterable[Site],
    norms: Mapping[nn.Module, Affine],
    downs: Iterable[nn.Module],
    options: Mapping[str, Any],
) -> nn.Module:
    """Returns a copy of a model with the new values of all sites, each worked out in float64 where it is read.

    Values are kept where all are small. The layers `downs` read the Hadamard transform of their inputs, by its options.
    """
    other, memo = copied(model)
    sites = [*sites]
    is_kept = sum(folding.matrix_of(site.layer)[0].numel() for site in sites) < _KEPT
    online: dict[int, nn.Module] = {
        id(memo[id(layer)]): HadamardLinear.around(memo[id(layer)], **options) for layer in downs
    }
    last: dict[object, Tensor] = {}
    for site in sites:
        layer = site.layer
        copy_of: nn.Module = memo[id(folding.inner_of(layer))]
        target = folding.inner_of(online.get(id(copy_of), copy_of))
        names = (layer.name, layer.bias_name) if isinstance(layer, folding.Matrix) else ("weight", "bias")
        of_linear = isinstance(target, nn.Linear)  # in the place of a Conv1D, too
        new = functools.partial(site.values, "weight", of_linear=of_linear)
        _read_new(target, names[0], {} if is_kept else last, new)
        if site.shift is not None or (held_parameters(target).get(names[1]) is not None and site.outputs):
            _read_new(target, names[1], {}, functools.partial(site.values, "bias"))
    for norm, own in norms.items():
        for name, _, value in folding.new_affine(own):
            _read_new(memo[id(norm)], name, {}, value.clone)
        if own.is_replaced:
            online[id(memo[id(norm)])] = folding.root_mean_square(norm)
    return replaced(other, online)


def _read_new(layer: nn.Module, name: str, kept: dict[object, Tensor], new: Callable[[], Tensor]) -> None:
    """Makes a parameter of a layer what a function gives, as long as others do not need its place in `kept`."""

    def read(_: nn.Module) -> Tensor:
        if new not in kept:
            kept.clear()
            kept[new] = new()
        return kept[new]

    held: Any = layer  # the parameter stays, for what asks a model for its dtype and device
    held.__class__ = type(type(layer).__name__, (type(layer),), {name: property(read)})
