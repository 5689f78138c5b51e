"""What lives in a case, a model beside its plain float64 twin, and what must be true of it after every event."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

import stiefelkit as sk
from benchmarks.fuzz.layers import Net, cast, field_of, inputs_of, is_own, made, plain
from benchmarks.fuzz.steps import exact, off_by
from stiefelkit.contract.composite import cores
from stiefelkit.contract.param import each_frame
from stiefelkit.errors import ImageError, StiefelkitError
from stiefelkit.metrics import frame_tolerance, orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing.optimizer_cases import equal
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
    """A model and what trains it, as a case plans it; `refused` says what could not be made orthogonal."""

    def __init__(self, case: dict[str, Any]):
        self.case, self.layers, self.is_tied = case, case["layers"], case["tied"]
        self.real = getattr(torch, case["precision"])
        self.reals = [field_of(layer, self.real).to_real() for layer in self.layers]
        self.refused: list[str] = []
        self.checks: Counter[str] = Counter()
        self.is_plain, self.is_baked, self.is_averaged = [False] * len(self.layers), False, False
        self.net = self._tied([self._made(i) for i in range(len(self.layers))])
        self.optimizer = self.make_optimizer(self.net)
        self.scheduler = self.make_scheduler()
        self.generator = torch.Generator()
        self.draw_inputs(case["seed"])

    def _made(self, i: int) -> nn.Module:
        try:
            return made(self.layers[i], self.real)
        except StiefelkitError as error:
            self.refused.append(f"{self.layers[i]['kind']}: {error}")
            self.is_plain[i] = True
            return plain(self.layers[i], self.real)

    def fresh(self) -> Net:
        """A model of the same layers with other values, in the dtypes of the present one, out of reach of no map."""
        layers, seed = [], self.generator.initial_seed()
        for i, layer in enumerate(self.layers):
            real = self.real if is_own(layer) and not layer["complex"] else self.reals[i]
            for attempt in itertools.count():
                one = seed + i + 1000 * attempt
                torch.manual_seed(one)
                try:
                    layers.append(plain(layer, real) if self.is_plain[i] else made(layer, real, one))
                except ImageError:  # a weight that is a frame, or whose nearest is taken, may be out of reach
                    if attempt == 20:
                        raise
                else:
                    break
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
        groups = sk.optim.parameter_groups(net, plan["lr"])
        for group in groups:
            if "manifold" in group:
                group["manifold"] = f"stiefel:{plan['metric']}"
        name, settings = plan["free"]
        if any(p.is_complex() for group in groups if "manifold" not in group for p in group["params"]):
            settings = {key: value for key, value in settings.items() if key != "fused"}
        free = lambda groups: sk.optim.available()[name](groups, **settings)  # noqa: E731
        of_frames = lambda groups: sk.optim.available()[plan["frames"][0]](groups, **plan["frames"][1])  # noqa: E731
        bound, loose = ([group for group in groups if ("manifold" in group) is b] for b in (True, False))
        if plan["mixed"] and bound and loose:
            return sk.optim.MixedOptimizer([of_frames(bound), free(loose)])
        return free(loose) if plan["mixed"] and loose else of_frames(groups)

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
        dtypes = [self.real if is_own(layer) else real for layer, real in zip(self.layers, self.reals, strict=True)]
        return [tuple(cast(t, real) for t in one) for real, one in zip(dtypes, self.exact_inputs, strict=True)]

    def loss(self, outputs: list[Tensor], eps: float = 0.0) -> Tensor:
        """A linear function of all outputs, in float64, of factors that may be off by `eps`."""
        generator = torch.Generator().manual_seed(self.probe_seed)
        total = torch.zeros((), dtype=torch.float64)
        for y in outputs:
            dtype = working_dtype(y.dtype)
            g = torch.randn(y.shape, dtype=dtype, generator=generator)
            g = off_by(eps, g, torch.Generator().manual_seed(self.probe_seed)) if eps else g
            total = total + (y.to(dtype) * g.conj()).real.sum()
        return total

    def number(self, below: int) -> int:
        """Draws a number for the event that happens."""
        return int(torch.randint(below, (), generator=self.generator))

    def weight(self) -> OrthogonalWeight | None:
        """One of the orthogonal weights, or None if there is none."""
        held = list(orthogonal_weights(self.net))
        return held[self.number(len(held))] if held else None

    def weight_named(self, qualified: str) -> OrthogonalWeight:
        """The orthogonal weight of this name."""
        return next(weight for weight in orthogonal_weights(self.net) if weight.qualified == qualified)

    def baked(self) -> None:
        """Notes which weights are plain now, and whether two are still tied."""
        left = {int(weight.qualified.split(".")[1]): weight.coordinate_list for weight in orthogonal_weights(self.net)}
        self.is_plain, self.is_baked = [i not in left for i in range(len(self.layers))], True
        self.is_tied = self.is_tied and left.get(0) is not None and left.get(0) is left.get(len(self.layers) - 1)
        self.renew()

    def bits(self) -> dict[str, Any]:
        """Everything that a refused event must leave as it is, by name, but for what is nothing.

        That is moments of zero, and remainders of frames, which are dropped where these were written to.
        """
        tensors = [*self.net.named_parameters(), *self.net.named_buffers()]
        held: dict[str, Any] = {key: t.detach().clone() for key, t in tensors}
        held |= {f"requires_grad of {key}": t.requires_grad for key, t in tensors}
        held |= {f"class and mode of {key}": (type(m).__name__, m.training) for key, m in self.net.named_modules()}
        for path, value in tree_leaves_with_path(copy.deepcopy(self.optimizer.state_dict())):
            key = f"state{keystr(path)}"
            if not key.endswith(("['lo']", "['wear']")) and not (isinstance(value, Tensor) and not value.any()):
                held[key] = value
        return held

    def check(self, before: Weights, expectation: str) -> None:
        """Checks everything that is true of a model at any time, and that weights are what they were, or near them.

        Args:
            before: the weights then.
            expectation: "same" bits, "near" up to rounding, "any".
        """
        weights = list(orthogonal_weights(self.net))
        ours = {id(c) for weight in weights for c in weight.coordinate_list.coordinates.values()}
        if not all(torch.isfinite(p).all() for p in self.net.parameters() if id(p) not in ours):
            raise Ended
        for key, w in self.net.weights().items():
            old = before.get(key)
            if old is None or expectation == "any":
                continue
            require(old.shape == w.shape, f"{key} has another shape, {tuple(w.shape)}")
            self.checks[f"weights {expectation}"] += 1
            if expectation == "same":
                require(equal(old, w), f"{key} has changed by {distance(old, w):.3g}")
            else:
                bound = 200 * max(torch.finfo(t.dtype).eps for t in (old, w)) * max(1.0, size_of(old))
                require(distance(old, w) <= bound, f"{key} is {distance(old, w):.3g} away, more than {bound:.3g}")
        for weight in weights:
            self.check_frame(weight)
        if weights:
            require(all(math.isfinite(d.error) for d in sk.drift(self.net).values()), "drift is not finite")
        self.check_state()
        self.check_values(weights)

    def check_state(self) -> None:
        """The state dict, loaded into a copy, gives the same weights."""
        other, state = copy.deepcopy(self.net), self.net.state_dict()
        with torch.no_grad():
            for p in other.parameters():
                p.data = torch.zeros_like(p)
        other.load_state_dict({key: t.clone() for key, t in state.items()})
        self.checks["round trips of state dicts"] += 1
        for (key, w), again in zip(self.net.weights().items(), other.weights().values(), strict=True):
            require(equal(w, again), f"{key} is {distance(w, again):.3g} off after a round trip of its state dict")

    def check_frame(self, weight: OrthogonalWeight) -> None:
        """A weight is a frame up to what is promised, of its dtype, trained as it is, and read twice the same."""
        one, name = weight.coordinate_list, weight.qualified
        held = list(one.coordinates.values())
        w, again = (getattr(weight.host, weight.name) for _ in range(2))
        require(bool(torch.isfinite(w).all()), f"{name} is not finite")
        require(equal(w, again), f"{name} is another when read again")
        require(w.dtype == one.param.dtype, f"{name} is {w.dtype}, its map {one.param.dtype}")
        require(not w.is_conj() and w.is_contiguous(), f"{name} is a lazy view")
        require(w.requires_grad == any(c.requires_grad for c in held), f"{name} loses its gradient, or gets one")
        for start, core in cores(one.param):
            own = held[start : start + len(core.coordinates)]
            for q in each_frame(core.bare(*own)):
                error, bound = orthogonality_error(q).max().item(), core.error_bound(*own)
                if core.manifolds:  # what optimizers leave, and what is read as it stands
                    coarse = max(q.dtype, *(c.dtype for c in own), key=lambda t: torch.finfo(t).eps)
                    bound = max(bound, 32 * rounding_limit(q.shape[-1], coarse) + torch.finfo(coarse).eps)
                    if self.is_averaged:  # through .data, of which no count tells
                        bound = max(bound, frame_tolerance(q.shape[-1], coarse))
                self.checks["frames"] += 1
                require(error <= bound, f"{name} is off by {error:.3g}, {bound:.3g} promised")

    def evaluate(
        self, net: Any, inputs: list[tuple[Tensor, ...]], call: Callable[..., Any] | None = None, eps: float = 0.0
    ) -> Any:
        """Outputs, gradients of inputs, and of parameters by name."""
        inputs = [tuple(t.detach().requires_grad_(t.dtype != torch.int64) for t in one) for one in inputs]
        leaves = [t for one in inputs for t in one if t.requires_grad]
        parameters = {key: p for key, p in net.named_parameters() if p.requires_grad}
        outputs = (net if call is None else call)(inputs)  # a compiled one may be without a length
        wanted = [*leaves, *parameters.values()]
        loss, grads = self.loss(outputs, eps), [None] * len(wanted)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        of_parameters = dict(zip(parameters, grads[len(leaves) :], strict=True))
        return [y.detach() for y in outputs], grads[: len(leaves)], of_parameters

    def agree(self, what: str, call: Callable[..., Any]) -> None:
        """Requires outputs and gradients of another road to be those of the model up to rounding."""
        there, here = (self.evaluate(self.net, self.inputs(), road) for road in (call, None))
        for one, other in zip(there[:2], here[:2], strict=True):
            self.compare(what, one, other)
        for key, g in here[2].items():
            self.compare(f"{what}: gradient of {key}", [there[2].get(key)], [g])

    def check_values(self, weights: list[OrthogonalWeight]) -> None:
        """Outputs and gradients are those of the twin, and gradients of coordinates follow by the chain rule.

        The twin is also asked at parameters and inputs that are off by their rounding: what comes of that bounds what
        rounding may do to the model. One draw may happen to do little: where it does not bound, eight have to.
        """
        try:
            self._check_values(weights, 1)
        except Finding:
            self._check_values(weights, 8)

    def _check_values(self, weights: list[OrthogonalWeight], draws: int) -> None:
        twin = Net([plain(layer, torch.float64) for layer in self.layers], self.net.kinds)
        values = {**dict(self.net.named_parameters(remove_duplicate=False)), **self.net.weights()}
        for key, p in twin.named_parameters():
            p.data = exact(values[key])
        generator = torch.Generator().manual_seed(self.probe_seed)
        ours, there = self.evaluate(self.net, self.inputs()), self.evaluate(twin, self.exact_inputs)
        parameters = [(p, p.data) for p in twin.parameters()]
        nears = []
        for _ in range(draws):
            for p, data in parameters:
                p.data = off_by(self.eps, data, generator)
            moved = [tuple(off_by(self.eps, t, generator) for t in x) for x in self.exact_inputs]
            nears.append(self.evaluate(twin, moved, eps=self.eps))
        for i, what in enumerate(("output", "gradient of an input")):
            self.compare(what, ours[i], there[i], [near[i] for near in nears])
        for key in there[2].keys() & ours[2].keys():
            b, *c = (sum(one[2][k] for k in one[2] if values[k] is values[key]) for one in (there, *nears))
            self.compare(f"gradient of {key}", [ours[2][key]], [b], [[one] for one in c])
        for weight in {id(weight.coordinate_list): weight for weight in weights[::-1]}.values():
            tied = [w.qualified for w in weights if w.coordinate_list is weight.coordinate_list]
            b, *c = (sum(one[2][key] for key in tied) for one in (there, *nears))
            self.check_chain(weight, b, c, ours[2], generator)

    def check_chain(self, weight: Any, g: Any, nears: list[Any], grads: Any, generator: torch.Generator) -> None:
        """A weight and gradients of its coordinates are those of the map in float64, and those finite differences."""
        one, prefix = weight.coordinate_list, weight.qualified.rpartition(".")[0]
        map64 = copy.deepcopy(one.param).to(working_dtype(one.param.dtype))
        held = [exact(c) for c in one.coordinates.values()]
        w, slopes = _with_slopes(map64, held, g)
        there = [_with_slopes(map64, [off_by(self.eps, c, generator) for c in held], near) for near in nears]
        self.compare(
            f"{prefix}: the weight", [getattr(weight.host, weight.name).detach()], [w], [[t[0]] for t in there]
        )
        for j, (name, b) in enumerate(zip(one.coordinates, slopes, strict=True)):
            full = f"{prefix}.parametrizations.{weight.name}.original{j}"
            if one.coordinates[name].requires_grad and b is not None and b.numel():
                require(grads.get(full) is not None, f"{full} has no gradient")
                self.compare(f"gradient of {full} ({name})", [grads[full]], [b], [[t[1][j]] for t in there], size_of(g))
        if one.param.manifolds:  # where the derivative of what is read is not that of what is off the manifold
            return
        along = [torch.randn(c.shape, dtype=c.dtype, generator=generator) for c in held]
        with torch.no_grad():
            at = {
                h: [map64(*(c + k * h * d for c, d in zip(held, along, strict=True))) for k in (1, -1)] for h in STEPS
            }
        coarse, fine = (_inner(g, (a - b).reshape(g.shape)) / (2 * h) for h, (a, b) in at.items())
        slope = sum(_inner(b, d) for b, d in zip(slopes, along, strict=True) if b is not None and b.numel())
        bound = 4 * abs(fine - coarse) + 1e-7 * size_of(g) * max(1.0, *map(size_of, [w, *along]))
        self.checks["finite differences"] += 1
        require(abs((4 * fine - coarse) / 3 - slope) <= bound, f"{prefix}: a slope is {slope:.9g}, not {fine:.9g}")

    @property
    def eps(self) -> float:
        """The unit of rounding of the coarsest dtype in the model."""
        return max([torch.finfo(real).eps for real in (self.real, *self.reals)])

    def compare(self, what: str, ours: Any, expected: Any, near: Any = None, size: float = 0.0) -> None:
        """Requires tensors to be equal up to rounding: on two roads, or by what the twin makes of rounding."""
        factor = {torch.bfloat16: 24, torch.float16: 60}.get(self.real, 2000)
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            if a is None or b is None:
                require(a is None or not bool(a.abs().sum() > 0), f"{what} should not be there")
                continue
            self.checks["values on two roads" if near is None else "values beside the twin"] += 1
            require(a.shape == b.shape, f"{what} has shape {tuple(a.shape)}, not {tuple(b.shape)}")
            rounding = self.eps * max(1.0, size_of(b) + size)
            spread = max(distance(b, one[i]) for one in near or [expected])
            bound = factor * rounding if near is None else 16 * spread + 8 * rounding
            require(distance(a, b) <= bound, f"{what} is off by {distance(a, b):.3g}, more than {bound:.3g}")


STEPS = (2e-4, 1e-4)
"""Of finite differences."""


def _with_slopes(param: Any, held: list[Tensor], g: Tensor) -> tuple[Tensor, Any]:
    held = [c.clone().requires_grad_() for c in held]
    w = param(*held)
    return w.detach(), torch.autograd.grad(w, held, g.reshape(w.shape), allow_unused=True)


def _inner(a: Tensor, b: Tensor) -> float:
    return (a.conj() * b).real.sum().item()


def size_of(t: Tensor) -> float:
    """The Frobenius norm."""
    return torch.linalg.vector_norm(exact(t)).item()


def distance(a: Tensor, b: Tensor) -> float:
    """The Frobenius norm of the difference; infinite if it is none."""
    off = size_of(exact(a) - exact(b))
    return off if math.isfinite(off) else math.inf
