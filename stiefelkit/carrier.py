"""What carries the coordinates of a parametrized weight: `CoordinateList`, and the class of its host module.

Everything that leans on private names of torch.nn.utils.parametrize lives here, with tests that say so when torch
renames them.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefelkit import registry
from stiefelkit.errors import CheckpointError, ImageError, NonFiniteError, UnfilledError
from stiefelkit.param import OrthogonalParam, keep_precision

__all__ = ["CoordinateList", "attach_carrier", "carriers", "check_state_dict"]

_FORMAT = 1
_EXTRA = "_extra_state"


class CoordinateList(parametrize.ParametrizationList):
    """Holds the coordinates of one weight, by name, and the map that turns them into it.

    It is `module.parametrizations.<name>` after `sk.orthogonal`. Coordinates are the parameters `original0`,
    `original1`, ... in state dicts, and attributes by their own names (`.skew`), as the chart is (`.signs`). State
    dicts also hold one small uint8 tensor that names the map, so that a checkpoint of another map is refused before
    anything is written.

    Args:
        param: the map.
        coordinates: one tensor per coordinate, in the order of `param.coordinates`.
        requires_grad: whether the coordinates train.
    """

    def __init__(self, param: OrthogonalParam, coordinates: Sequence[Tensor], requires_grad: bool = True):
        nn.ModuleList.__init__(self, [param])
        self.unsafe = True
        self.is_tensor = False
        self.ntensors = len(coordinates)
        for i, c in enumerate(coordinates):
            self.register_parameter(f"original{i}", nn.Parameter(c.contiguous(), requires_grad))
        self.filled = not any(c.is_meta for c in coordinates)

    @property
    def param(self) -> OrthogonalParam:
        """The map."""
        return self[0]  # type: ignore[return-value]

    @property
    def coordinates(self) -> dict[str, nn.Parameter]:
        """Name to parameter of each coordinate."""
        return {name: getattr(self, f"original{i}") for i, name in enumerate(self.param.coordinates)}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # "_modules" is missing while unpickling.
            param = self.__dict__.get("_modules", {}).get("0")
            if param is not None and name in param.coordinates:
                return self.coordinates[name]
            if param is not None and name in param.chart:
                return param.chart[name]
            raise

    def forward(self) -> Tensor:
        """Evaluates the weight, in row-major order."""
        self._check_filled()
        return super().forward().contiguous()

    def evaluate_whole(self) -> Tensor:
        """Evaluates the map on gathered coordinates: the whole weight on every rank, also under FSDP2."""
        self._check_filled()
        gathered = [getattr(c, "full_tensor", lambda c=c: c)() for c in self.coordinates.values()]
        return self.param(*gathered)

    @torch.no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Sets the coordinates so that the weight is `value`: checked first, copied, never aliased."""
        values: Any = value
        for member in reversed(self):
            if not hasattr(member, "right_inverse"):
                raise ImageError(
                    f"Assigning needs a right_inverse in every parametrization, got {type(member).__name__}."
                )
            values = member.right_inverse(values)  # type: ignore[operator]
        self.fill_(values)

    @torch.no_grad()
    def fill_(self, values: Sequence[Tensor]) -> None:
        """Copies values into the coordinates; sharded ones keep their placement."""
        for c, value in zip(self.coordinates.values(), values, strict=True):
            if hasattr(c, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(c), c.device_mesh, c.placements, src_data_rank=None)  # type: ignore[attr-defined]
            c.copy_(value)
        self.filled = not any(c.is_meta for c in self.coordinates.values())

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of this weight: the map, its version, field, shape, options and coordinates."""
        param = self.param
        return {
            "format": _FORMAT,
            "map": _map_name(param),
            "version": param.version,
            "field": "complex" if param.is_complex else "real",
            "shape": list(param.shape),
            "options": param.options(),
            "coordinates": list(param.coordinates),
        }

    def get_extra_state(self) -> Tensor:
        """Returns `describe()` as JSON in a uint8 tensor."""
        return torch.tensor(list(json.dumps(self.describe()).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Does nothing: `_load_from_state_dict` has checked the state already."""

    def check(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raises CheckpointError or NonFiniteError unless the entries under a prefix fit this weight.

        Args:
            state_dict: a whole state dict.
            prefix: where this weight's entries begin, "layer.parametrizations.weight.".
        """
        if not any(key.startswith(prefix) for key in state_dict):
            return
        host, _, name = prefix.removesuffix(".").rpartition("parametrizations.")
        weight = host + name
        if prefix + _EXTRA not in state_dict:
            raise CheckpointError(
                f"{weight} needs a checkpoint that names its map (key {prefix + _EXTRA}), got one without; "
                "load into torch's own parametrization, assign the weight with sk.assign_, and save again."
            )
        theirs, ours = _read_description(state_dict[prefix + _EXTRA], weight), self.describe()
        for key, mine in ours.items():
            if theirs.get(key) != mine:
                raise CheckpointError(
                    f"{weight} needs a checkpoint with {key} {mine!r}, got {theirs.get(key)!r}; to change the "
                    "map, load into the old one and assign its weight to the new one with sk.assign_."
                )
        for i, (name, c) in enumerate(self.coordinates.items()):
            _check_entry(state_dict, f"{prefix}original{i}", f"{weight} ({name})", c.shape)
        for name, choice in self.param.named_buffers():
            _check_entry(state_dict, f"{prefix}0.{name}", f"{weight} ({name})", choice.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.check(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if all(f"{prefix}original{i}" in state_dict for i in range(self.ntensors)):
            self.filled = not any(c.is_meta for c in self.coordinates.values())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoordinateList":
        """Moves and casts: the weight's dtype follows the user, coordinates stay in float32 or better."""
        was_meta = any(c.is_meta for c in self.coordinates.values())
        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(keep_precision(fn, self.param.dtype), recurse=False)
        # torch's to_empty calls fn = empty_like: only what fn does to known values tells it from a move.
        known = torch.arange(1.0, 65.0)
        probe = fn(known.clone())
        if was_meta or probe.is_meta or not torch.equal(probe.detach().cpu().float(), known):
            self.filled = False
        return self

    def _check_filled(self) -> None:
        if not self.filled:
            raise UnfilledError(
                f"{self.param.title} needs filled coordinates, got a weight that was moved to or from the meta "
                "device or through to_empty; call load_state_dict or sk.reset_ first."
            )


def carriers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, CoordinateList]]:
    """Yields (qualified weight name, host, name, carrier) for every weight under a module, shared ones once."""
    for prefix, host in module.named_modules():
        for name, carrier in _own_carriers(host):
            yield (f"{prefix}.{name}" if prefix else name), host, name, carrier


def attach_carrier(module: nn.Module, name: str, carrier: CoordinateList) -> None:
    """Replaces a plain parameter of a module by what a carrier evaluates to."""
    plain = parametrize.type_before_parametrizations(module)
    delattr(module, name)
    if not parametrize.is_parametrized(module):
        module.parametrizations = nn.ModuleDict()
    module.parametrizations[name] = carrier.train(module.training)  # type: ignore[operator, index]
    _inject(module, plain, list(module.parametrizations))  # type: ignore[arg-type]


def check_state_dict(module: nn.Module, state_dict: dict[str, Any]) -> None:
    """Checks every orthogonal weight of a model against a state dict, before anything is loaded.

    Args:
        module: the model.
        state_dict: what `module.load_state_dict` will be given.

    Raises:
        CheckpointError: an entry belongs to another map, shape, field or version, or is a plain weight.
        NonFiniteError: coordinates hold NaN or infinity.
    """
    for host_name, host in module.named_modules():
        for name, _ in _own_carriers(host):
            _check_host(host, name, state_dict, f"{host_name}." if host_name else "")


def _own_carriers(host: nn.Module) -> list[tuple[str, CoordinateList]]:
    if not parametrize.is_parametrized(host):
        return []
    return [(n, c) for n, c in host.parametrizations.items() if isinstance(c, CoordinateList)]  # type: ignore[union-attr, operator]


def _check_host(host: nn.Module, name: str, state_dict: dict[str, Any], prefix: str) -> None:
    carrier: CoordinateList = host.parametrizations[name]  # type: ignore[index, assignment]
    inside = f"{prefix}parametrizations.{name}."
    if prefix + name in state_dict:
        raise CheckpointError(
            f"{prefix}{name} needs the coordinates of {carrier.param.title}, got a plain weight; load it before "
            "sk.orthogonal, or assign it with sk.assign_."
        )
    carrier.check(state_dict, inside)


def _inject(module: nn.Module, plain: Any, names: Iterable[str]) -> None:
    """Gives a parametrized module an injected class of its own, which copies, pickles and checks what it loads.

    torch lets deep copies share one injected class: then changing one copy breaks the other, and
    `parametrize.cached()` hands one copy's weight to the other.
    """

    def rebuilt(self: nn.Module) -> nn.Module:
        return _rebuild(plain, list(self.parametrizations))  # type: ignore[arg-type]

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if hasattr(plain, "__deepcopy__"):
            replica = plain.__deepcopy__(self, memo)
            _inject(replica, plain, list(replica.parametrizations))
            return replica
        memo[id(self)] = replica = rebuilt(self)
        replica.__dict__ = copy.deepcopy(self.__dict__, memo)
        return replica

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (plain, list(self.parametrizations)), self.__dict__  # type: ignore[arg-type]

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        # nn.Module would try to register a Parameter beside the property, and fail.
        if isinstance(value, nn.Parameter) and name in self.__dict__.get("_modules", {}).get("parametrizations", ()):
            value = value.detach()
        plain.__setattr__(self, name, value)

    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, _ in _own_carriers(self):
            _check_host(self, name, state_dict, prefix)
        plain._load_from_state_dict(self, state_dict, prefix, *args)  # type: ignore[attr-defined]

    # _inject_property insists that the names are no attributes yet, so the class is made on a bare instance.
    bare = plain.__new__(plain)
    parametrize._inject_new_class(bare)  # type: ignore[attr-defined]
    for name in names:
        parametrize._inject_property(bare, name)  # type: ignore[attr-defined]
    own = type(bare)
    own.__deepcopy__ = deepcopy  # type: ignore[attr-defined]
    own.__reduce_ex__ = reduce_ex  # type: ignore[assignment]
    own.__setattr__ = set_attribute  # type: ignore[assignment]
    own._load_from_state_dict = load  # type: ignore[attr-defined]
    module.__class__ = own


def _rebuild(plain: Any, names: Sequence[str]) -> nn.Module:
    module = plain.__new__(plain)
    _inject(module, plain, names)
    return module


def _map_name(param: OrthogonalParam) -> str:
    own = registry.parametrizations.name_of(type(param)) or type(param).__qualname__
    inner = [_map_name(child) for child in param.children() if isinstance(child, OrthogonalParam)]
    return f"{own}({', '.join(inner)})" if inner else own


def _read_description(state: Any, weight: str) -> dict[str, Any]:
    try:
        return dict(json.loads(bytes(state.tolist()).decode()))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weight} needs a checkpoint that names its map, got an unreadable entry.") from error


def _check_entry(state_dict: dict[str, Any], key: str, what: str, shape: torch.Size) -> None:
    if key not in state_dict:
        raise CheckpointError(f"{what} needs the entry {key}, got a checkpoint without it.")
    value = state_dict[key]
    if tuple(value.shape) != tuple(shape):
        raise CheckpointError(f"{what} needs shape {tuple(shape)}, got {tuple(value.shape)}.")
    local = value.to_local() if hasattr(value, "to_local") else value
    if not local.is_meta and not torch.isfinite(local).all():
        raise NonFiniteError(f"{what} needs finite coordinates, got a checkpoint with NaN or infinity.")
