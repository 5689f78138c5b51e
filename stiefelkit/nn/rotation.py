"""Rotations that are folded into the linear layers around them, as quantization of language models wants."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit._torch import held_parameters
from stiefelkit.errors import CheckpointError, DtypeError, NotAFrameError, OptionError, ShapeError, needs, warn_caller
from stiefelkit.functional import hadamard_transform, nearest_frame
from stiefelkit.metrics import frame_tolerance, orthogonality_error
from stiefelkit.nn import folding, stream
from stiefelkit.nn.adapter import Replacement, replaced
from stiefelkit.nn.decoders import Heads, RotationSites, check_sites
from stiefelkit.nn.folding import Affine, Factor, Site, kind_of
from stiefelkit.nn.frozen import (
    agree,
    attribute,
    beyond_affine,
    foreign_hooks,
    has_own_forward,
    in_other_adapters,
    probes,
    twin,
)
from stiefelkit.nn.linear import HadamardLinear


@torch.no_grad()
def rotate_(
    rotation: Tensor | None = None,
    *,
    sites: RotationSites,
    heads: Tensor | Sequence[Tensor] | None = None,
    online: bool | Mapping[str, Any] = False,
    check: bool = True,
) -> None:
    """Folds a rotation R of features h into the layers around them: what they write and read is R h from then on.

    Writers, whose outputs are added up to h, get :math:`R W` and :math:`R b`, readers :math:`W R^T`, and what does both
    :math:`R W R^T` and :math:`R b`: the function of the whole is the same, but for rounding. A norm between them must
    commute with R, as a root mean square does; its scale is folded into those that read it, and is one from then on. A
    layer norm is made a root mean square: writers are centred, and its bias goes into readers. Each tensor is worked
    out once, in float64, and rounded once; nothing is written before all of it was checked. With R of
    `sk.orthogonal(layer, "weight", "stiefel")` that is layer.weight.

    Args:
        rotation: R, n x n; None with `heads` or `online` alone. The nearest rotation is taken of what was rounded, and
            a warning says how far away it is.
        sites: the layers, of `rotation_sites(model)` for a whole decoder, or a `RotationSites` of one's own. A head
            that is tied to the embedding and has to differ from it gets a weight of its own, and the configuration says
            so.
        heads: rotations between the value and the output layer of each attention of `sites`: a matrix for all heads, a
            stack of one for each head of keys and values, or a sequence of these, one for each block.
        online: multiplies what `sites.downs` read by a Hadamard matrix when the model runs, and their weights by its
            inverse; each becomes a `HadamardLinear`, under the same name, with the key "hadamard" beside its weight,
            which no plain layer loads; `config.stiefelkit_online` is `online` then, if the model has a configuration.
            With options of `hadamard_transform` in the place of True, {"block": 128}, it is made by them.
        check: whether outputs of the model are compared before anything is written: a copy that shares its weights runs
            with the new values, in float64, on tokens, on images and on `sites.inputs`. What writes or reads h and was
            left out is refused by its name. New weights of more than 2^27 entries in all are worked out again in each
            of three runs.

    Layers with hooks, in adapters, or with a forward of their own that does not commute with R are refused.

    >>> net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    >>> before = net(x)
    >>> sites = RotationSites(net, {}, [net[0]], readers=[net[1]], inputs={"input": x})
    >>> rotate_(torch.eye(4).flip(0), sites=sites)
    >>> torch.allclose(net(x), before, atol=1e-6)
    True
    """
    is_something = rotation is not None or heads is not None or bool(online)
    needs(is_something, OptionError, "rotate_", "a rotation, heads= or online=True beside sites=", "none of them")
    r = None if rotation is None else checked_rotation(rotation, "a rotation")
    check_sites(sites, "rotate_")
    if r is not None:
        wanted = f"a rotation of the {sites.size} features of the stream"
        needs(len(r) == sites.size, ShapeError, "rotate_", wanted, tuple(r.shape))
    stacks = [] if heads is None else _stacks(sites.heads, heads)
    if (options := online_options(online)) is not None:
        check_downs(sites.downs, options)
    fold = _Fold(sites, turned_sites(sites, r, stacks, options), options)
    if r is not None:
        fold.add_norms(r, is_turned=True)
    changes = fold.require()
    if check:
        fold.prove("rotate_", 0.0 if r is None else orthogonality_error(r).item())
    fold.write(changes)


@torch.no_grad()
def absorb_norms_(sites: RotationSites, *, check: bool = True) -> None:
    """Absorbs all norms of a decoder into what reads them, so that any rotation of its stream commutes with them.

    What `rotate_` does to norms, without a rotation: scales and biases go into readers, layer norms become root mean
    squares of centred inputs, a head that has to differ from the embedding gets a weight of its own.

    Args:
        sites: the layers, of `rotation_sites(model)`.
        check: whether outputs are compared first, as `rotate_` does; by a rotation that is not kept, so that what was
            left out is seen here, too.
    """
    check_sites(sites, "absorb_norms_")
    v = probes(sites.size, torch.device("cpu"))[0]
    generic = torch.eye(len(v), dtype=v.dtype, device="cpu") - 2 * torch.outer(v, v) / (v @ v)
    if check:
        turned = _Fold(sites, turned_sites(sites, generic))
        turned.add_norms(generic, is_turned=True)
        turned.require()
        turned.prove("absorb_norms_", 0.0)
    fold = _Fold(sites, {})
    fold.add_norms(generic, is_turned=False)
    fold.write(fold.require())


@torch.no_grad()
def absorb_norm_(norm: nn.Module, readers: Iterable[nn.Module]) -> None:
    """Moves the scale of a norm, and the bias of a layer norm, into all layers that read it.

    The norm's scale is one from then on and its bias zero; what readers compute is the same, but for rounding. They get
    :math:`W diag(g)` and :math:`b + W c`, worked out in float64 and rounded once. A linear layer without a bias gets
    one where c is not zero. A parameter that holds the scale minus one, as Gemma's, becomes zero.

    Args:
        norm: the norm.
        readers: the linear layers that read it, all of them.

    >>> norm, layer = nn.LayerNorm(4), nn.Linear(4, 2)
    >>> torch.nn.init.normal_(norm.bias).shape
    torch.Size([4])
    >>> x = torch.randn(3, 4)
    >>> before = layer(norm(x))
    >>> absorb_norm_(norm, [layer])
    >>> torch.allclose(layer(norm(x)), before, atol=1e-6), norm.bias.abs().sum().item()
    (True, 0.0)
    """
    fold = _Fold(None, {})
    fold.add_norm(norm, readers)
    has_scale = norm in fold.affine and fold.affine[norm].values is not None
    needs(has_scale, OptionError, "absorb_norm_", "a norm with a scale of its own", kind_of(norm))
    fold.write(fold.require())


class _Fold:
    """Layers with what is to be folded into them, and norms that lose a scale, of a model if there are its sites."""

    def __init__(self, sites: RotationSites | None, found: dict[int, Site], online: Mapping[str, Any] | None = None):
        self.sites, self.found, self.online = sites, found, online
        self.affine: dict[nn.Module, Affine] = {}

    def add_norms(self, r: Tensor, is_turned: bool) -> None:
        """Adds what norms lose that do not commute with R, which the stream is turned by or not."""
        assert self.sites is not None
        norms = self.sites.norms
        for norm in norms:
            folding.require_filled(norm)
        is_centred = any(folding.layer_norm_eps(norm) is not None for norm in norms)
        is_centred &= not (is_turned and _commutes(nn.LayerNorm(len(r), elementwise_affine=False), r))
        centre = [Factor(len(r), lambda m: m - m.mean(-2, keepdim=True))] if is_centred else []
        for layer in dict.fromkeys(self.sites.writers):
            _site_of(self.found, layer).outputs[:0] = centre
        for norm, read in norms.items():
            self.add_norm(norm, read, r, is_turned, is_centred)

    def add_norm(
        self,
        norm: nn.Module,
        readers: Iterable[nn.Module],
        r: Tensor | None = None,
        is_turned: bool = False,
        is_centred: bool = False,
    ) -> None:
        """Adds what a norm loses, and what its readers get in front of the factors of R."""
        own, readers = _affine(norm, r, is_centred), dict.fromkeys(readers)
        if own is not None:
            has_no_bias = any(folding.weight_and_bias_of(layer)[1] is None for layer in readers)
            own = _with_bias(own, r) if is_turned and r is not None and not is_centred and has_no_bias else own
            self.affine[norm] = own._replace(is_replaced=is_centred and folding.layer_norm_eps(norm) is not None)
        g = None if own is None else own.values
        scale = [] if g is None else [Factor(len(g), lambda m, g=g: g.to(m.device)[:, None] * m)]
        shift = None if own is None or own.bias is None or own.new_bias is not None else own.bias.detach().double()
        for layer in readers:
            site = _site_of(self.found, layer)
            got = f"{kind_of(layer)} behind two"
            needs(site.norm in (None, norm), OptionError, "Folding", "one norm in front of a layer", got)
            site.norm, site.shift = norm, shift
            site.inputs[:0] = scale

    def require(self) -> list[folding.Change]:
        """Checks all layers, and returns their changes."""
        changes = folding.changes_of(list(self.found.values()))
        model = nn.Module() if self.sites is None else self.sites.model
        others = in_other_adapters(model)
        others |= {id(a.layer): type(a).__name__ for a in model.modules() if isinstance(a, Replacement)}
        layers = [site.layer for site in self.found.values()]
        for module in [*self.affine, *layers, *map(folding.inner_of, layers)]:
            got = f"{kind_of(module)} with hooks; remove them first"
            needs(not foreign_hooks(module), OptionError, "Folding", "layers and norms without hooks", got)
            got = f"{kind_of(module)} inside {others.get(id(module))}; fold or merge_and_unload it first"
            needs(id(module) not in others, OptionError, "Folding", "layers that nothing else adds to", got)
        for site in self.found.values():
            is_known = isinstance(site.layer, HadamardLinear) and not site.inputs
            is_known |= isinstance(site.layer, folding.Matrix)
            found = None if is_known or _gives_rows(site) else beyond_affine(site.layer)
            needs(found is None, OptionError, "Folding", "layers that compute W x + b", found)
        folding.require_finite(changes)
        return changes

    def prove(self, who: str, error: float) -> None:
        """Raises OptionError if a copy of the model with all changes gives other outputs."""
        assert self.sites is not None
        sites = self.sites
        first = self.found.get(id(sites.writers[0]))

        def turn(x: Tensor) -> Tensor:
            y = x.flatten(0, -2).mT
            for factor in [] if first is None else first.outputs:
                y = factor.apply(y)
            return y.mT.view(x.shape)

        values, read = [one.value for one in sites.heads], [*itertools.chain(*sites.norms.values()), *sites.readers]
        groups = {"reader": read, "value": values, "writer": sites.writers, "norm": sites.norms}
        names = {id(module): name for name, module in sites.model.named_modules()}
        inner = [(folding.inner_of(layer), role) for role, group in groups.items() for layer in group]
        roles = {names.get(id(layer), ""): role for layer, role in inner}
        downs = () if self.online is None else sites.downs
        changed = stream.changed_copy(sites.model, self.found.values(), self.affine, downs, self.online or {})
        runs = stream.own_probes(sites.model, sites.writers, sites.size, sites.inputs)
        stream.require_same(sites.model, changed, runs, turn, roles, who, error)

    def write(self, changes: Sequence[folding.Change]) -> None:
        """Writes changes, and puts new norms and layers into the model and the sites.

        `save_pretrained` raises then where `from_pretrained` would make other norms, or a head without a bias.
        """
        model = None if self.sites is None else self.sites.model
        others = folding.write(changes, self.affine, model)
        if self.sites is None or model is None:
            return
        is_another = any(change.name == "bias" and change.is_new for change in changes) or bool(others)
        if self.online is not None:
            others |= {id(layer): HadamardLinear.around(layer, **self.online) for layer in self.sites.downs}
            if (config := attribute(model, "config")) is not None:
                config.stiefelkit_online = self.online or True
        for module in model.modules() if is_another else ():
            is_adapted = attribute(type(module), "get_base_model") is not None  # PEFT saves its own
            if callable(attribute(type(module), "from_pretrained")) and not is_adapted:
                vars(module)["save_pretrained"] = functools.partial(_refuse, kind_of(module))
        replaced(model, others)
        self.sites.replace(others)


def _refuse(kind: str, *_: object, **__: object) -> None:
    got = f"{kind} with norms and biases that its class does not make; torch.save(model, path), or rotate another by"
    got += " sk.nn.mean_preserving(R), which leaves it as its class makes it"
    raise CheckpointError(f"save_pretrained needs a model that from_pretrained makes again, got {got}.")


def mean_preserving(rotation: Tensor) -> Tensor:
    """Returns the rotation nearest to R that leaves the mean of features as it is, up to its sign, in float64.

    :math:`(I - 2 v v^T / v^T v) R` with :math:`v = R 1 ∓ 1` maps the vector of ones to one of its signs. A layer norm
    commutes with it, so that a model with layer norms has the norms and the keys that it had, and `from_pretrained`
    loads it. Of the n features of a centred stream one less is free anyway.

    Args:
        rotation: R, n x n.

    >>> r = mean_preserving(torch.eye(3)[[1, 2, 0]])
    >>> bool((r.sum(1) - 1).abs().max() < 1e-12)
    True
    """
    r = checked_rotation(rotation, "a rotation")
    image = r.sum(1)
    v = image - (1.0 if image.sum() >= 0 else -1.0)
    square = v @ v
    return r if square < 1e-20 else r - 2 / square * torch.outer(v, v @ r)


def checked_rotation(rotation: Tensor, what: str, who: str = "rotate_") -> Tensor:
    """Returns a square orthogonal matrix, or a stack of such, in float64."""
    rotation = torch.as_tensor(rotation, device=rotation.device if isinstance(rotation, Tensor) else "cpu")
    is_square = rotation.dim() >= 2 and rotation.shape[-2] == rotation.shape[-1]
    is_square &= what != "a rotation" or rotation.dim() == 2
    needs(is_square, ShapeError, who, "a square matrix", tuple(rotation.shape))
    is_real = not rotation.dtype.is_complex and not rotation.is_meta
    needs(is_real, DtypeError, who, "a matrix of real numbers", f"{rotation.dtype} on {rotation.device.type}")
    dtype = rotation.dtype if rotation.dtype in (torch.float32, torch.float64) else torch.float32
    rotation = rotation.detach().double()
    error = orthogonality_error(rotation).max().item()
    got = f"one with ||R^T R - I||_F = {error:.2g}; sk.functional.nearest_frame of it in float64 gives the nearest"
    n = rotation.shape[-1]
    needs(error <= frame_tolerance(n, torch.bfloat16), NotAFrameError, who, "an orthogonal matrix", got)
    if error <= frame_tolerance(n, dtype):
        return rotation
    nearest = nearest_frame(rotation)
    warn_caller(
        f"{who} takes the rotation nearest to {what} with ||R^T R - I||_F = {error:.2g}, "
        f"{torch.dist(nearest, rotation).item():.2g} away in the Frobenius norm."
    )
    return nearest


def _site_of(found: dict[int, Site], layer: nn.Module) -> Site:
    """Returns the site of a layer, which is added to those that were found."""
    return found.setdefault(id(layer), Site(layer))


def turned_sites(
    sites: RotationSites,
    r: Tensor | None,
    heads: Sequence[Tensor] = (),
    options: Mapping[str, Any] | None = None,
) -> dict[int, Site]:
    """Returns the layers that rotations act on, by their ids, with the factors of these.

    R acts on the stream, a stack of `heads` on the heads of keys and values of each attention, and a Hadamard transform
    by its `options` on what `sites.downs` read.
    """
    found: dict[int, Site] = {}
    if r is not None:
        stream = Factor(len(r), lambda m: r.to(m.device) @ m)
        for layer in sites.writers:
            _site_of(found, layer).outputs[:] = [stream]
        for layer in itertools.chain(sites.readers, *sites.norms.values()):
            _site_of(found, layer).inputs[:] = [stream]
    for one, stack in zip(sites.heads, heads, strict=bool(heads)):
        size = len(folding.weight_and_bias_of(one.value)[0])
        _site_of(found, one.value).outputs.append(_of_heads(stack, one.rows, size))
        beside = stack.unflatten(0, (one.parts, -1)).transpose(0, 1)
        shared = beside.repeat_interleave(one.count // one.groups, 0).flatten(0, 1)
        rows = torch.arange(one.count * one.size, device="cpu")
        _site_of(found, one.output).inputs.append(_of_heads(shared, rows, len(rows)))
    if options is not None:
        for layer in sites.downs:
            n = folding.weight_and_bias_of(layer)[0].shape[-1]
            _site_of(found, layer).inputs.append(Factor(n, lambda m: hadamard_transform(m.mT, **options).mT))
    return found


def _stacks(attentions: Sequence[Heads], heads: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Returns a stack of rotations for each attention, one for each of its heads of keys and values."""
    each = [heads] * len(attentions) if isinstance(heads, Tensor) else [*heads]
    wanted = "heads= for a model whose values no clip nor norm acts on"
    needs(len(attentions) > 0, OptionError, "rotate_", wanted, "another")
    needs(len(each) == len(attentions), OptionError, "rotate_", f"heads= for {len(attentions)} attentions", len(each))
    stacks = [checked_rotation(given, "heads") for given in each]
    for one, stack in zip(attentions, stacks, strict=True):
        wanted = [(one.size, one.size), (one.groups, one.size, one.size)]
        needs(stack.shape in wanted, ShapeError, "rotate_", f"heads= of a shape in {wanted}", tuple(stack.shape))
        most, rows = int(one.rows.max()), len(folding.weight_and_bias_of(one.value)[0])
        got = f"{kind_of(one.value)} with {rows}"
        needs(most < rows, ShapeError, "rotate_", f"value layers with the rows of all heads, up to {most}", got)
    return [stack.expand(one.groups, one.size, one.size) for one, stack in zip(attentions, stacks, strict=True)]


def _of_heads(stack: Tensor, rows: Tensor, size: int) -> Factor:
    def apply(m: Tensor) -> Tensor:
        own = rows.to(m.device)
        turned = stack.to(m.device) @ m[own].unflatten(0, stack.shape[:2])
        return m.index_copy(0, own, turned.flatten(0, 1))

    return Factor(size, apply)


def online_options(online: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the options of `hadamard_transform` that `online=` gives, none for True; None for False."""
    return (dict(online) if isinstance(online, Mapping) else {}) if online else None


def check_downs(downs: Sequence[nn.Module], options: dict[str, Any]) -> None:
    """Raises an error where there is no such Hadamard matrix, or a layer transforms its input already."""
    got = "none; the forward of packed experts leaves no place for it"
    needs(len(downs) > 0, OptionError, "rotate_", "sites with downs for online=True", got)
    is_plain = not any(isinstance(layer, HadamardLinear) for layer in downs)
    needs(is_plain, OptionError, "rotate_", "online=True once at most", "a HadamardLinear among downs; leave it out")
    for layer in downs:
        hadamard_transform(torch.empty(0, folding.weight_and_bias_of(layer)[0].shape[-1], device="cpu"), **options)


def _affine(norm: nn.Module, r: Tensor | None, is_centred: bool) -> Affine | None:
    """Returns scale and bias of a norm that commutes with R but for them; None if it commutes as it is.

    Without R any norm will do that is a scale and a bias after what it does without them. `is_centred` says that inputs
    are, so that a layer norm is a root mean square.
    """
    weight, bias = held_parameters(norm).get("weight"), held_parameters(norm).get("bias")
    n = len(r) if r is not None else 0 if weight is None else len(weight)
    got = f"{kind_of(norm)} of shape {None if weight is None else tuple(weight.shape)}"
    is_fit = weight is None or weight.shape == (n,)
    needs(is_fit, ShapeError, "Folding", f"norms of {n} features", got)
    if r is not None and _commutes(norm, r):
        return None
    is_layer_norm = folding.layer_norm_eps(norm) is not None and (is_centred or r is None)
    if is_layer_norm and weight is None:
        return Affine(None, None, None, 1.0)
    if weight is not None and (bias is None or bias.shape == (n,)):
        x, w = probes(n, weight.device), weight.double()
        for neutral, values in ((1.0, w), (0.0, 1 + w)):
            bare = twin(norm, weight=torch.full_like(w, neutral), **({} if bias is None else {"bias": w * 0}))
            fits = is_layer_norm or r is None or _commutes(bare, r)
            y = bare(x) * values + (0 if bias is None else bias.double())
            if fits and agree(y, twin(norm)(x), n):
                return Affine(weight, bias, values, neutral)
    if r is None:
        return None
    raise OptionError(f"Folding needs a root mean square or a layer norm, and a scale, got {kind_of(norm)}.")


def _with_bias(own: Affine, r: Tensor) -> Affine:
    """Returns the scale and bias of a norm that stays, with what gives R c / g for c, if no entry of g is near zero."""
    if own.bias is None or own.values is None or own.values.abs().min() < 1e-3 * own.values.abs().max():
        return own
    return own._replace(new_bias=r.to(own.values.device) @ (own.bias.double() / own.values.double()))


def _commutes(norm: nn.Module, r: Tensor) -> bool:
    """Returns whether a norm gives R y for R x where it gives y for x."""
    device = next((p.device for p in norm.parameters()), r.device)
    x, r, other = probes(len(r), device), r.to(device, torch.float64), twin(norm)
    return agree(other(x @ r.mT), other(x) @ r.mT, len(r))


def _gives_rows(site: Site) -> bool:
    """Returns whether an embedding gives multiples of rows, as Gemma's does, which are rotated if the table is."""
    embedding = site.layer
    if not (isinstance(embedding, nn.Embedding) and has_own_forward(embedding)):
        return False
    x = torch.arange(min(embedding.num_embeddings, 8), device=embedding.weight.device)
    y, changed = twin(embedding)(x).mT, twin(embedding, weight=site.values("weight"))(x).mT
    for factor in site.outputs:
        y = factor.apply(y)
    return agree(changed, y, len(y))
