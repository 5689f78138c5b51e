"""What lives in a case, a model beside its plain float64 twin, and what must be true of it after every event."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk
from benchmarks.fuzz.layers import Net, cast, field_of, inputs_of, is_own, made, plain, weight_name
from stiefelkit.contract.composite import cores
from stiefelkit.contract.param import each_frame
from stiefelkit.errors import StiefelkitError
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.weights.find import OrthogonalWeight, orthogonal_weights

Weights = dict[str, Tensor]


class Ended(Exception):
    """What is plain has left the numbers, as torch lets it; nothing can be compared any more."""


class Finding(Exception):
    """Something is not as it must be, and nothing has said so."""


def require(holds: bool, text: str) -> None:
    """Raises Finding with a text unless something holds."""
    if not holds:
        raise Finding(text)


class World:
    """A model and what trains it.

    Args:
        case: the plan.

    Attributes:
        net: the model.
        real: dtype of its real tensors.
        reals: dtype of the real parts of the weight of each layer.
        built: how a fresh model of the same kind is made, from a seed and a dtype.
        refused: sentences of what could not be made orthogonal.
    """

    def __init__(self, case: dict[str, Any]):
        self.case = case
        self.real = getattr(torch, case["precision"])
        self.layers = case["layers"]
        self.refused: list[str] = []
        self.is_plain, self.is_baked = [False] * len(self.layers), False
        self.is_tied = case["tied"]
        self.net = self._tied([self._made(i) for i in range(len(self.layers))])
        self.reals = [_real_of(field_of(layer, self.real)) for layer in self.layers]
        self.optimizer = self.make_optimizer(self.net)
        self.scheduler = self.make_scheduler()
        self.draw_inputs(case["seed"])
        self.generator = torch.Generator()  # of the event that happens

    def _made(self, i: int) -> nn.Module:
        layer = self.layers[i]
        try:
            return made(layer, self.real)
        except StiefelkitError as error:
            self.refused.append(f"{layer['kind']}: {error}")
            self.is_plain[i] = True
            return plain(layer, self.real)

    def fresh(self) -> Net:
        """A model of the same layers with other values, in the dtypes of the present one."""
        layers, seed = [], self.generator.initial_seed()
        for i, layer in enumerate(self.layers):
            torch.manual_seed(seed + i)
            real = self.real if is_own(layer) and not layer["complex"] else self.reals[i]
            layers.append(plain(layer, real) if self.is_plain[i] else made(layer, real, seed + i))
            if is_own(layer) and not self.is_plain[i]:
                layers[-1].to(self.real)
        return self._tied(layers)

    def _tied(self, layers: list[nn.Module]) -> Net:
        """A net of layers, the last of which reads the weight of the first where they are to be tied."""
        if self.is_tied and not (self.is_plain[0] or self.is_plain[-1]):
            sk.tie(layers[0], "weight", layers[-1], "weight")
        return Net(layers, [layer["kind"] for layer in self.layers])

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """What trains a model, as the plan has it."""
        plan = self.case["optimizer"]
        groups = sk.optim.parameter_groups(net, plan["lr"], stiefel={"manifold": f"stiefel:{plan['metric']}"})
        name, settings = plan["free"]
        if any(p.is_complex() for group in groups if "manifold" not in group for p in group["params"]):
            settings = {key: value for key, value in settings.items() if key != "fused"}
        free = lambda groups: sk.optim.available()[name](groups, **settings)  # noqa: E731
        of_frames = lambda groups: sk.optim.available()[plan["frames"][0]](groups, **plan["frames"][1])  # noqa: E731
        bound = [group for group in groups if "manifold" in group]
        loose = [group for group in groups if "manifold" not in group]
        if not plan["mixed"]:
            return of_frames(groups)
        if bound and loose:
            return sk.optim.MixedOptimizer([of_frames(bound), free(loose)])
        return of_frames(bound) if bound else free(loose)

    def make_scheduler(self) -> Any:
        """A new scheduler of the present optimizer."""
        name, options = self.case["scheduler"]
        cls = getattr(torch.optim.lr_scheduler, name)
        try:
            return cls(self.optimizer, **options)
        except ValueError as error:
            if "momentum" not in str(error):
                raise
            return cls(self.optimizer, cycle_momentum=False, **options)

    def renew(self, net: Net | None = None, *, keeps: bool = False) -> None:
        """Takes another model, and makes the optimizer anew, with the state of the old one if it `keeps` it."""
        state = self.optimizer.state_dict() if keeps and not self.is_baked else None  # whose order is another
        self.net = self.net if net is None else net
        self.optimizer = self.make_optimizer(self.net)
        if state is not None:
            self.optimizer.load_state_dict(state)
        self.scheduler = self.make_scheduler()

    def draw_inputs(self, seed: int) -> None:
        """Draws inputs and the loss anew."""
        generator = torch.Generator().manual_seed(seed)
        self.exact_inputs = [inputs_of(layer, generator) for layer in self.layers]
        self.probe_seed = seed

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """The inputs as the model takes them."""
        return [
            tuple(cast(t, self.real if is_own(layer) else real) for t in one)
            for layer, real, one in zip(self.layers, self.reals, self.exact_inputs, strict=True)
        ]

    def loss(self, outputs: list[Tensor]) -> Tensor:
        """A linear function of all outputs, in float64."""
        generator = torch.Generator().manual_seed(self.probe_seed)
        total = torch.zeros((), dtype=torch.float64)
        for y in outputs:
            dtype = working_dtype(y.dtype)
            g = torch.randn(y.shape, dtype=dtype, generator=generator)
            total = total + (y.to(dtype) * g.conj()).real.sum()
        return total

    def weight(self) -> OrthogonalWeight | None:
        """One of the orthogonal weights, or None if there is none."""
        held = self.all_weights()
        return held[self.number(len(held))] if held else None

    def weight_named(self, qualified: str) -> OrthogonalWeight:
        """The orthogonal weight of this name."""
        return next(weight for weight in self.all_weights() if weight.qualified == qualified)

    def place(self, weight: OrthogonalWeight) -> int:
        """Which layer a weight is of."""
        return int(weight.qualified.split(".")[1])

    def number(self, below: int) -> int:
        """Draws a number for the event that happens."""
        return int(torch.randint(below, (), generator=self.generator))

    def all_weights(self) -> list[OrthogonalWeight]:
        """Every orthogonal weight."""
        return list(orthogonal_weights(self.net))

    def weights(self) -> Weights:
        """The values of all weights of layers, by name, orthogonal or not."""
        held = zip(self.net.kinds, self.net.layers, strict=True)
        return {f"layers.{i}": getattr(x, weight_name(kind)).detach().clone() for i, (kind, x) in enumerate(held)}

    def bits(self) -> dict[str, Any]:
        """Everything that a refused event must leave as it is."""
        tensors = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        return {
            "tensors": {key: t.detach().clone() for key, t in tensors.items()},
            "trains": {key: t.requires_grad for key, t in tensors.items()},
            "modes": [module.training for module in self.net.modules()],
            "classes": [type(module).__name__ for module in self.net.modules()],
            "state": copy.deepcopy(self.optimizer.state_dict()),
        }

    def check(self, before: Weights, expectation: str) -> None:
        """Checks everything that is true of a model at any time, and that weights are what they were, or near them.

        Args:
            before: the weights then.
            expectation: "same" bits, "near" up to rounding, "any".
        """
        now = self.weights()
        ours = {id(c) for weight in self.all_weights() for c in weight.coordinate_list.coordinates.values()}
        if not all(torch.isfinite(p).all() for p in self.net.parameters() if id(p) not in ours):
            raise Ended
        for key, w in now.items():
            old = before.get(key)
            if old is None or expectation == "any":
                continue
            require(old.shape == w.shape, f"{key} has another shape, {tuple(w.shape)}")
            if expectation == "same":
                require(equal(old, w), f"{key} has changed by {distance(old, w):.3g}")
            else:
                bound = 200 * max(torch.finfo(t.dtype).eps for t in (old, w)) * max(1.0, size_of(old))
                require(distance(old, w) <= bound, f"{key} is {distance(old, w):.3g} away, more than {bound:.3g}")
        self.check_frames()
        self.check_values(now)

    def check_frames(self) -> None:
        """Every weight is a frame up to what is promised, and read twice the same."""
        lands_later = any(group.get("every", 1) > 1 for group in self.optimizer.param_groups)
        for weight in self.all_weights():
            one, name = weight.coordinate_list, weight.qualified
            w, again = (getattr(weight.host, weight.name) for _ in range(2))
            require(bool(torch.isfinite(w).all()), f"{name} is not finite")
            require(equal(w, again), f"{name} is another when read again")
            require(w.dtype == one.param.dtype, f"{name} is {w.dtype}, its map {one.param.dtype}")
            require(not w.is_conj() and w.is_contiguous(), f"{name} is a lazy view")
            trains = any(c.requires_grad for c in one.coordinates.values())
            require(w.requires_grad == trains, f"{name} loses its gradient, or gets one")
            held = list(one.coordinates.values())
            for start, core in cores(one.param):
                own = held[start : start + len(core.coordinates)]
                for q in each_frame(core.bare(*own)):
                    error, bound = orthogonality_error(q).max().item(), core.error_bound(*own)
                    if core.manifolds:  # what optimizers leave, and what is read as it stands
                        coarse = max(q.dtype, *(c.dtype for c in own), key=lambda t: torch.finfo(t).eps)
                        kept = 32 * rounding_limit(q.shape[-1], coarse) + torch.finfo(coarse).eps
                        bound = math.inf if lands_later else max(bound, kept)
                    require(error <= bound, f"{name} is off by {error:.3g}, {bound:.3g} promised")
        if self.all_weights():
            require(all(math.isfinite(d.error) for d in sk.drift(self.net).values()), "drift is not finite")

    def twin(self) -> Net:
        """The same net with plain float64 parameters."""
        net = Net([plain(layer, torch.float64) for layer in self.layers], self.net.kinds)
        for kind, layer, own in zip(self.net.kinds, net.layers, self.net.layers, strict=True):
            names = dict(own.named_parameters())
            for key, p in layer.named_parameters():
                value = getattr(own, key) if key == weight_name(kind) else names[key]
                with torch.no_grad():
                    p.copy_(value.to(working_dtype(value.dtype)))
        return net

    def evaluate(self, net: nn.Module, inputs: list[tuple[Tensor, ...]], call: Callable[..., Any] | None = None) -> Any:
        """Outputs, gradients of inputs, and of parameters by name."""
        inputs = [tuple(t.detach().requires_grad_(not t.dtype == torch.int64) for t in one) for one in inputs]
        leaves = [t for one in inputs for t in one if t.requires_grad]
        parameters = {key: p for key, p in net.named_parameters() if p.requires_grad}
        outputs = (net if call is None else call)(inputs)
        wanted = [*leaves, *parameters.values()]
        loss = self.loss(outputs)
        grads: Any = [None] * len(wanted)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        of_parameters = dict(zip(parameters, grads[len(leaves) :], strict=True))
        return [y.detach() for y in outputs], grads[: len(leaves)], of_parameters

    def agree(self, what: str, there: Any, here: Any) -> None:
        """Requires outputs and gradients of two roads to be the same up to rounding."""
        for one, other in zip(there[:2], here[:2], strict=True):
            self.compare(what, one, other)
        for key, g in here[2].items():
            self.compare(f"{what}: gradient of {key}", [there[2].get(key)], [g])

    def check_values(self, now: Weights) -> None:
        """Outputs and gradients are those of the twin, and gradients of coordinates follow by the chain rule."""
        twin = self.twin()
        exact, exact_x, exact_p = self.evaluate(twin, self.exact_inputs)
        ours, ours_x, ours_p = self.evaluate(self.net, self.inputs())
        self.compare("output", ours, exact)
        self.compare("gradient of an input", ours_x, exact_x)
        plain_ones = dict(self.net.named_parameters(remove_duplicate=False))
        for key in exact_p.keys() & ours_p.keys():
            tied = [exact_p[k] for k, p in plain_ones.items() if p is plain_ones[key]]
            self.compare(f"gradient of {key}", [ours_p[key]], [torch.stack(tied).sum(0)])
        weights = self.all_weights()
        for weight in {id(weight.coordinate_list): weight for weight in weights[::-1]}.values():
            tied = [exact_p[w.qualified] for w in weights if w.coordinate_list is weight.coordinate_list]
            self.check_chain(weight, torch.stack(tied).sum(0), ours_p)

    def check_chain(self, weight: OrthogonalWeight, of_weight: Tensor, grads: dict[str, Any]) -> None:
        """The weight and the gradients of its coordinates are those of the map in float64."""
        one, prefix = weight.coordinate_list, weight.qualified.rpartition(".")[0]
        exact = copy.deepcopy(one.param).to(working_dtype(one.param.dtype))
        held = [c.detach().to(working_dtype(c.dtype)).requires_grad_() for c in one.coordinates.values()]
        w = exact(*held)
        own = getattr(weight.host, weight.name)
        self.compare(f"{prefix}: the weight", [own.detach()], [w.detach()])
        expected = torch.autograd.grad(w, held, of_weight.reshape(w.shape), allow_unused=True)
        size = size_of(of_weight)
        for j, (name, g) in enumerate(zip(one.coordinates, expected, strict=True)):
            full = f"{prefix}.parametrizations.{weight.name}.original{j}"
            if one.coordinates[name].requires_grad and g is not None and g.numel():
                require(grads.get(full) is not None, f"{full} has no gradient")
                self.compare(f"gradient of {full} ({name})", [grads[full]], [g], size)

    def compare(self, what: str, ours: Any, exact: Any, size: float = 0.0) -> None:
        """Requires tensors to be equal up to rounding in the dtype of the model."""
        eps = max([torch.finfo(self.real).eps, *(torch.finfo(real).eps for real in self.reals)])
        factor = {"bfloat16": 24, "float16": 60}.get(str(self.real).removeprefix("torch."), 2000)
        for a, b in zip(ours, exact, strict=True):
            if a is None or b is None:
                require(a is None or not bool(a.abs().sum() > 0), f"{what} should not be there")
                continue
            require(a.shape == b.shape, f"{what} has shape {tuple(a.shape)}, not {tuple(b.shape)}")
            bound = factor * eps * max(1.0, size_of(b) + size)
            require(distance(a, b) <= bound, f"{what} is off by {distance(a, b):.3g}, more than {bound:.3g}")


def _real_of(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def size_of(t: Tensor) -> float:
    """The Frobenius norm."""
    return torch.linalg.vector_norm(t.detach().to(working_dtype(t.dtype))).item()


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether tensors have the same bits, NaN included."""
    a, b = a.detach(), b.detach()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def distance(a: Tensor, b: Tensor) -> float:
    """The Frobenius norm of the difference; infinite if it is none."""
    off = size_of(a.detach().to(working_dtype(a.dtype)) - b.detach().to(working_dtype(b.dtype)))
    return off if math.isfinite(off) else math.inf
