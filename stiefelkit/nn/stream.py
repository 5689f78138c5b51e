"""What a model computes before and after its layers are rotated, in float64, and the layer that differs first."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stiefelkit._torch import TorchDispatchMode, dispatch_modes, held_modules, held_parameters
from stiefelkit.errors import OptionError, needs
from stiefelkit.nn import folding
from stiefelkit.nn.adapter import replaced
from stiefelkit.nn.folding import Affine, Site
from stiefelkit.nn.frozen import agree, attribute
from stiefelkit.nn.linear import HadamardLinear

Turn = Callable[[Tensor], Tensor]
_KEPT = 2**27  # entries of new weights that are not worked out again at each read


class Layers(NamedTuple):
    """The layers of a model that are rotated, each by its id."""

    norms: set[int]
    readers: set[int]
    writers: set[int]
    values: set[int]  # whose outputs are turned head by head


class _Call(NamedTuple):
    name: str
    module: nn.Module
    x: Tensor | None
    y: Tensor | None


class _InFloat64(TorchDispatchMode):
    """Works in float64 whatever the dtype of weights is, and whatever the model casts to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        written = args[0] if func._schema.is_mutable and args and isinstance(args[0], Tensor) else None
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


@contextlib.contextmanager
def _quiet(model: nn.Module, is_exact: bool) -> Iterator[None]:
    devices = {p.device for p in model.parameters()}
    kind = next((d.type for d in devices if d.type != "cpu"), "cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng([d for d in devices if d.type == "cuda"]))
        stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_InFloat64() if is_exact else contextlib.nullcontext())
        yield


def _logits(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found.detach().clone()]
    named = found.items() if isinstance(found, Mapping) else enumerate(found)
    tensors = [(str(key), t) for key, t in named if isinstance(t, Tensor) and t.is_floating_point()]
    logits = [t for key, t in tensors if "logits" in key] or [t for _, t in tensors[:1]]
    return [t.detach().clone() for t in logits]


class Probe(NamedTuple):
    """A run of a model, in which what stands in the place of embeddings is turned first; it gives logits."""

    on: str
    run: Callable[[nn.Module, Turn], list[Tensor]]
    is_wanted: bool = False  # whether a model that does not run so is refused


def own_probes(model: nn.Module, writers: Sequence[nn.Module], n: int, inputs: Mapping[str, Any] | None) -> list[Probe]:
    """Returns runs of a model on inputs that are given, or images, on tokens, once and in two steps, and embeddings."""
    known = inspect.signature(model.forward).parameters
    tables = [m for m in writers if isinstance(m, nn.Embedding)]
    probes = [] if inputs is None else [Probe("the inputs given", lambda m, _: _logits(m(**inputs)), True)]
    if not tables:
        return probes
    count, like = min([8, *(t.num_embeddings for t in tables[1:])]), tables[0].weight
    source = torch.Generator().manual_seed(0)
    ids = _words(model, len(like))
    ids = ids[torch.randperm(len(ids), generator=source, device="cpu")].repeat(count)[None, :count].to(like.device)
    probes.append(Probe("tokens", lambda m, _: _logits(m(ids))))
    cache = next((key for key in ("cache", "past_key_values") if key in known), None)
    if cache is not None:

        def in_steps(m: nn.Module, _: Turn) -> list[Tensor]:
            first = m(ids[:, : count // 2], use_cache=True)
            held = {cache: attribute(first, "past_key_values", "cache")}
            return [*_logits(first), *_logits(m(ids[:, count // 2 :], **held))]

        probes.insert(len(probes) - 1, Probe("tokens in two steps", in_steps))
    if "inputs_embeds" in known:
        x = torch.randn(1, count, n, generator=source, dtype=torch.float64, device="cpu").to(like.device)
        probes.append(Probe("inputs_embeds", lambda m, turn: _logits(m(inputs_embeds=turn(x).to(like.dtype)))))
    config = attribute(model, "config")
    senses = [key for key in ("vision_config", "audio_config") if attribute(config, key) is not None]
    if inputs is None and senses:
        probes.insert(0, Probe(f"images (of {senses[-1]})", _of_images(config, ids, n, like), True))
    return probes


def _words(model: nn.Module, count: int) -> Tensor:
    """Returns tokens that stand for no image and no end, as far as the configuration says."""
    config = attribute(model, "config")
    held = [vars(c) for c in (config, attribute(config, "text_config")) if c is not None]
    special = {v for c in held for key, v in c.items() if "token" in key and type(v) is int}
    return torch.tensor([i for i in range(min(count, 4096)) if i not in special] or [0], device="cpu")


def _of_images(config: Any, ids: Tensor, n: int, like: Tensor) -> Callable[[nn.Module, Turn], list[Tensor]]:
    vision, token = attribute(config, "vision_config"), attribute(config, "image_token_id", "image_token_index")
    size = attribute(vision, "image_size", default=32)
    shape = (attribute(vision, "num_channels", default=3), *(size if isinstance(size, list | tuple) else (size, size)))
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0), device="cpu").to(like)

    def run(m: nn.Module, _: Turn) -> list[Tensor]:
        find: Any = attribute(m, "get_image_features")
        errors: list[Exception] = []
        for pixels in (x, x[None]):  # images, or images of each text
            try:
                found = find(pixel_values=pixels)
                found = attribute(found, "pooler_output", default=found)
                rows = sum(t.numel() // n for t in ([found] if isinstance(found, Tensor) else found))
                marked = torch.cat([ids[:, :2], torch.full_like(ids[:, :1], token).expand(-1, rows), ids[:, 2:]], 1)
                return _logits(m(input_ids=marked, pixel_values=pixels))
            except Exception as error:  # of a model that takes other images
                errors.append(error)
        raise errors[0]

    return run


def writers_beside(
    model: nn.Module, base: nn.Module, writers: Sequence[nn.Module], n: int, inputs: Mapping[str, Any] | None
) -> list[nn.Module]:
    """Returns layers outside of a base model whose outputs it reads as embeddings: of images, and soft prompts."""
    inside = set(map(id, base.modules()))
    outside = {
        name: m
        for name, m in model.named_modules()
        if id(m) not in inside and attribute(m, "embedding_dim", "out_features") == n and m is not writers[0]
    }
    if not outside or any(p.is_meta for p in model.parameters()):
        return []
    other, memo = copied(model)
    read: list[Tensor] = []
    given: dict[str, list[Tensor]] = {}
    memo[id(base)].register_forward_pre_hook(
        lambda _, args, kwargs: read.extend(t for t in [kwargs.get("inputs_embeds")] if t is not None), with_kwargs=True
    )
    for name in outside:
        copy_of = other.get_submodule(name)
        given[name] = [copy_of.weight] if isinstance(copy_of, nn.Embedding) and copy_of.weight.numel() < 2**20 else []
        copy_of.register_forward_hook(_kept_in(given[name]))
    for _ in runnable(other, own_probes(model, writers, n, inputs), "rotation_sites"):
        pass
    rows = _directions(read, n)
    return [m for name, m in outside.items() if bool(((rows @ _directions(given[name], n).mT).abs() > 1 - 1e-6).any())]


def _kept_in(found: list[Tensor]) -> Callable[[object, object, Tensor], None]:
    return lambda _, args, y: found.append(y)


def _directions(found: list[Tensor], n: int) -> Tensor:
    """Returns rows of n features with the norm one, so that an inner product of one says that they are parallel."""
    rows = torch.cat([torch.zeros(0, n), *(t.detach().reshape(-1, n).to("cpu", torch.float64) for t in found)])
    return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=1e-30)


def runnable(model: nn.Module, probes: Iterable[Probe], who: str) -> Iterator[tuple[Probe, bool, list[Tensor]]]:
    """Yields the probes that a model takes, with whether it takes them in float64 and what it gives then."""
    count = 0
    for probe in probes:
        failed: Exception | None = None
        for is_exact in (True, False):
            try:
                with _quiet(model, is_exact):
                    found = probe.run(model, _identity)
            except Exception as error:  # whatever a stranger's forward raises
                failed = error
                continue
            got = f"{type(model).__name__} with others on {probe.on}"
            needs(all(bool(y.isfinite().all()) for y in found), OptionError, who, "a model with finite outputs", got)
            count += 1
            yield probe, is_exact, found
            break
        else:
            wanted = f"a model that runs on {probe.on}, or inputs= of rotation_sites, of its processor"
            needs(not probe.is_wanted, OptionError, who, wanted, f"{type(failed).__name__} of {type(model).__name__}")
    wanted = "a model that runs on tokens, or inputs= in its sites, or check=False"
    needs(count > 0, OptionError, who, wanted, type(model).__name__)


def require_same(
    model: nn.Module, changed: nn.Module, probes: Sequence[Probe], turn: Turn, layers: Layers, who: str, error: float
) -> None:
    """Raises OptionError, with the name of the layer that it is from, if a changed copy of a model gives others.

    Args:
        model: the model.
        changed: the copy.
        probes: of `own_probes`.
        turn: how vectors of the stream are turned, rows in float64.
        layers: those of the model that were changed.
        who: the caller, in messages.
        error: by how much the rotation is off an orthogonal matrix.
    """
    plain, memo = copied(model)
    for probe, is_exact, before in runnable(plain, probes, who):
        bound = 1e-6 + 100 * error if is_exact else 4 * torch.finfo(before[0].dtype).eps ** 0.5
        with _quiet(model, is_exact):
            after = probe.run(changed, turn)
        off = [float(torch.dist(b, a) / b.norm().clamp(min=1e-30)) for b, a in zip(before, after, strict=True)]
        if all(far <= bound for far in off):  # which NaN is not
            continue
        with _quiet(model, is_exact):
            calls = [_recorded(m, plain, probe, own) for m, own in ((plain, _identity), (changed, turn))]
        found = _culprit(calls[0], calls[1], turn, Layers(*({id(memo[i]) for i in group} for group in layers)), plain)
        got = f"{max(off):.1e} off on {probe.on}: {found}; check=False folds all the same"
        raise OptionError(f"{who} needs sites that leave the outputs of {type(model).__name__} equal, got {got}.")


def _identity(x: Tensor) -> Tensor:
    return x


def _recorded(model: nn.Module, like: nn.Module, probe: Probe, turn: Turn) -> list[_Call]:
    """Returns the calls of layers of a model, those that have none inside in another one like it."""
    calls: list[_Call] = []

    def look(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], y: object) -> None:
            x, y = (
                next((t for t in found if isinstance(t, Tensor)), None)
                for found in ([*args, *kwargs.values()], y if isinstance(y, tuple) else [y])
            )
            calls.append(_Call(name, module, x, y))

        return module.register_forward_hook(hook, with_kwargs=True, always_call=True)

    found = dict(model.named_modules())
    handles = [look(name, found[name]) for name, m in like.named_modules() if not held_modules(m)]
    try:
        probe.run(model, turn)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _place(x: Tensor | None) -> int:
    return 0 if x is None else x.untyped_storage().data_ptr()


def _culprit(before: list[_Call], after: list[_Call], turn: Turn, layers: Layers, model: nn.Module) -> str:
    """Returns the sentence that names what writes or reads the stream and was not rotated, as far as calls tell."""
    read, beside, first = {_place(call.x) for call in before}, list[tuple[str, int]](), ""
    behind: set[int] = set()
    for one, two in zip(before, after, strict=False):
        key, named = id(one.module), f"{one.name}, {type(one.module).__name__},"
        x, y = _relation(one.x, two.x, turn), _relation(one.y, two.y, turn)
        is_listed = any(key in group for group in layers)
        if x == "other" and key in layers.norms and one.x is not None:
            shape = one.x.shape[-1:]
            held = [
                f"{at}.{p}"
                for at, m in model.named_modules()
                if held_modules(m)
                for p, t in held_parameters(m).items()
                if t is not None and t.shape[-1:] == shape
            ]
            seen = [name for name, size in beside if size == shape[0]][-1:] or held[:1]
            what = next(iter(seen), f"what is computed in front of {one.name}, by no layer,")
            return f"{what} writes the stream and is not among the writers"
        behind |= {_place(one.y)} if key in layers.norms else set()
        if not is_listed and _place(one.x) in behind and y == "other":
            return f"{named} reads the stream behind a norm and is not among the readers"
        if not is_listed and x == "turned" and y == "other":
            is_norm = one.x is not None and one.y is not None and one.x.shape == one.y.shape
            is_norm &= not isinstance(one.module, nn.Linear)
            if is_norm and _place(one.y) in read:
                return f"{named} has a scale and is not among the norms; norms={{norm: readers}} folds it"
            if is_norm:
                return f"{named} norms what is added to the stream, and no rotation passes the scale of a norm"
            return f"{named} reads the stream and is not among the readers"
        if not is_listed and y == "same" and one.y is not None and _place(one.y) not in read:
            beside.append((named, one.y.shape[-1]))
        if key in layers.writers and y in ("same", "other"):
            cause = "reads what its layers did not write, as values of a prefix in a cache" if x == "other" else ""
            return f"{named} {cause or 'writes to the stream what is not turned'}"
        if key in layers.norms and x == "same":
            return f"{named} is among the norms and does not read the stream"
        if key in layers.readers - layers.writers - layers.values and y == "other":
            return f"{named} does not read the norm that it is listed behind, or reads another beside"
        first = first or (f"the first that differs is {named[:-1]}" if x == "other" and not is_listed else "")
    return first or "no layer tells where"


def _relation(x: Tensor | None, y: Tensor | None, turn: Turn) -> str:
    """Returns how what a layer reads or gives was changed."""
    if x is None or y is None or x.shape != y.shape or not x.is_floating_point():
        return "unknown"
    with contextlib.suppress(Exception):  # of another size than the stream's
        if agree(y, turn(x.double()), x.shape[-1]):
            return "turned"
    return "same" if agree(y, x, x.shape[-1]) else "other"


def changed_copy(
    model: nn.Module, sites: Iterable[Site], norms: Mapping[nn.Module, Affine], downs: Iterable[nn.Module]
) -> nn.Module:
    """Returns a copy of a model with the new values of all sites, each worked out in float64 where it is read.

    Values are kept where all are small. The layers `downs` read the Hadamard transform of their inputs.
    """
    other, memo = copied(model)
    sites = [*sites]
    is_kept = sum(folding.matrix_of(site.layer)[0].numel() for site in sites) < _KEPT
    online: dict[int, nn.Module] = {id(memo[id(layer)]): HadamardLinear.around(memo[id(layer)]) for layer in downs}
    last: dict[object, Tensor] = {}
    for site in sites:
        layer, (w, dim) = site.layer, folding.matrix_of(site.layer)
        copy_of: nn.Module = memo[id(folding.inner_of(layer))]
        target = folding.inner_of(online.get(id(copy_of), copy_of))
        names = (layer.name, layer.bias_name) if isinstance(layer, folding.Matrix) else ("weight", "bias")
        is_turned = dim == -1 and isinstance(target, nn.Linear)
        _read_new(target, names[0], w, {} if is_kept else last, functools.partial(_weight, site, is_turned))
        if site.shift is not None or (held_parameters(target).get(names[1]) is not None and site.outputs):
            _read_new(target, names[1], w, {}, functools.partial(site.values, "bias"))
    for norm, own in norms.items():
        for name, tensor, value in folding.new_affine(own):
            _read_new(memo[id(norm)], name, tensor, {}, value.clone)
        if own.is_replaced:
            online[id(memo[id(norm)])] = folding.root_mean_square(norm)
    return replaced(other, online)


def _weight(site: Site, is_turned: bool) -> Tensor:
    return site.values("weight").mT if is_turned else site.values("weight")


def _read_new(layer: nn.Module, name: str, like: Tensor, kept: dict[object, Tensor], new: Callable[[], Tensor]) -> None:
    """Makes a parameter of a layer what a function gives, as long as others do not need its place in `kept`."""

    def read(_: nn.Module) -> Tensor:
        key = (new, dispatch_modes())  # float64 inside of the mode
        if key not in kept:
            kept.clear()
            kept[key] = new().to(like.dtype)
        return kept[key]

    held: Any = layer  # the parameter stays, for what asks a model for its dtype and device
    held.__class__ = type(type(layer).__name__, (type(layer),), {name: property(read)})
