"""One step of each optimizer, retaken in float64: by the formulas of papers, on dense matrices, or by torch's own."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.metrics import working_dtype

Group = dict[str, Any]
State = dict[str, Any]
Step = tuple[Tensor, State]


def exact(value: Any) -> Any:
    """A copy of a tensor in float64 or complex128; anything else as it is."""
    is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().to(working_dtype(value.dtype), copy=True) if is_number else value


def off_by(eps: float, value: Any, generator: torch.Generator, by_entry: bool = False) -> Any:
    """A tensor with a relative error at random, of each entry or of the norm; numbers and integers as they are."""
    if not isinstance(value, Tensor) or not value.dim() or not (value.is_floating_point() or value.is_complex()):
        return value
    noise = torch.randn(value.shape, dtype=value.dtype, generator=generator)
    return value + eps * noise * (value if by_entry else value.norm() / max(value.numel(), 1) ** 0.5)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def _eye(p: int, like: Tensor) -> Tensor:
    return torch.eye(p, dtype=like.dtype)


def _sign(x: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * (s > 1e-6 * s.amax(-1, keepdim=True)).unsqueeze(-2)) @ vh


def _parts(w: Tensor, m: Tensor, o: Group) -> tuple[Tensor, Tensor]:
    """Omega and P of the Riemannian gradient W Omega + P."""
    s = w.mH @ m
    rest = torch.zeros_like(m) if m.shape[-2] == m.shape[-1] else m - w @ s
    return (s - s.mH) * (1.0 if o["manifold"].endswith("canonical") else 0.5), rest


def _source(w: Tensor, turn: Tensor, rest: Tensor, o: Group) -> Tensor:
    """The tangent vector of which these are the parts."""
    return w @ turn * (0.5 if o["manifold"].endswith("canonical") else 1.0) + rest


def _cayley(a: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve(_eye(a.shape[-1], a) + a / 2, x - a @ x / 2)


def _along(w: Tensor, turn: Tensor, rest: Tensor, step: Any) -> Tensor:
    """The n x n Cayley transform of the skew A with A W = W Omega + P."""
    return _cayley((w @ turn @ w.mH + rest @ w.mH - w @ rest.mH) * step, w)


def _length(turn: Tensor, rest: Tensor) -> Tensor:
    return torch.hypot(_norm(turn), math.sqrt(2) * _norm(rest))


def _moments(g: Tensor, s: State, o: Group, root: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, State]:
    """Adam's first moment, what it is divided by, and what is kept of the second, one for each matrix."""
    (b1, b2), k = o["betas"], s.get("step", 0) + 1
    v = b2 * torch.as_tensor(s.get("exp_avg_sq", 0.0))[..., None, None] + (1 - b2) * _norm(g) ** 2
    return b1 * s.get("exp_avg", 0) + (1 - b1) * g, (1 - b1**k) * root(v / (1 - b2**k)), {"exp_avg_sq": v[..., 0, 0]}


def _with_momentum(g: Tensor, s: State, o: Group) -> Tensor:
    return g + o["momentum"] * s.get("momentum_buffer", 0)


def _bounded(w: Tensor, m: Tensor, o: Group, r: Any = 1.0) -> tuple[Tensor, Tensor]:
    """Along the Cayley transform of A / r by min(lr, 2 q / norm of A / r), and the tangent vector that m is."""
    turn, rest = _parts(w, m, o)
    length = torch.hypot(_norm(turn), math.sqrt(2) * _norm(rest))
    if "grad_clip" in o and w.shape[-1] == w.shape[-2]:  # as SGDG has it
        length = torch.linalg.matrix_norm(turn, 1)[..., None, None]
    step = (2 * o.get("q", math.inf) * r / length).clamp(max=o["lr"]) / r
    return _cayley((w @ turn @ w.mH + rest @ w.mH - w @ rest.mH) * step, w), _source(w, turn, rest, o)


def _cayley_sgd(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    if o.get("grad_clip") is not None:
        g = g * (o["grad_clip"] / _norm(g)).clamp(max=1.0)
    moved, along = _bounded(w, _with_momentum(g, s, o), o)
    return moved, {"momentum_buffer": along}


def _cayley_adam(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    m, r, moments = _moments(g, s, o, lambda v: (v + o["eps"]).sqrt())
    moved, along = _bounded(w, m, o, r)
    return moved, {"exp_avg": along, **moments}


def _multiplicative(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    kept = {}
    if o["precondition"]:
        parts, squares = (torch.view_as_real(t) if t.is_complex() else t for t in (g, s.get("square_avg", 0 * g)))
        squares = o["alpha"] * squares + (1 - o["alpha"]) * parts**2
        back = torch.view_as_complex if g.is_complex() else torch.clone
        g, kept["square_avg"] = back(parts / (squares.sqrt() + o["eps"])), back(squares)
    moved, kept["momentum_buffer"] = _bounded(w, _with_momentum(g, s, o), o)
    return moved, kept


def _split(w: Tensor, turn: Tensor, rest: Tensor, v: Tensor, t: Any, o: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Where the scheme of Kong, Wang and Tao leads, (I + E)^(1/2), and the V there, which turns in euclidean."""
    rotation = _cayley(t * turn, _eye(turn.shape[-1], w).expand_as(turn))
    if o["manifold"].endswith("euclidean"):
        rest, v = rest @ rotation.mH, v @ rotation.mH
    values, vectors = torch.linalg.eigh(_eye(w.shape[-1], w) + t * t * rest.mH @ rest)
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mH
    moved = torch.linalg.solve(root, w @ rotation - t * rest, left=False)
    return moved, root, v


def _stiefel_sgd(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    turn, rest = _parts(w, _with_momentum(g, s, o), o)
    moved, root, v = _split(w, turn, rest, rest, o["lr"], o)
    return moved, {"momentum_buffer": _source(moved, turn, (v - moved @ (moved.mH @ v)) @ root, o)}


def _stiefel_adam(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    (b1, b2), k, kept = o["betas"], s.get("step", 0) + 1, {}
    noise = 4 * o["eps of the frame"] * torch.maximum(_norm(g), _norm(s.get("exp_avg", 0 * g)))
    momentum, along = [], []
    keys = ("exp_avg_sq", "") if w.shape[-1] == w.shape[-2] else ("rotation_sq", "exp_avg_sq")
    for key, old, new in zip(keys, _parts(w, s.get("exp_avg", 0 * g), o), _parts(w, g, o), strict=True):
        kept[key] = b2 * s.get(key, 0) + (1 - b2) * new.abs() ** 2
        root = (kept[key] / (1 - b2**k)).sqrt()
        momentum.append(b1 * old + (1 - b1) * new)
        along.append(torch.where(root > noise, momentum[-1] / (1 - b1**k) / (root + o["eps"]), 0.0))
    turn, rest = along
    moved, _, v = _split(w, turn, rest - w @ (w.mH @ rest), momentum[1], o["lr"], o)
    kept.pop("", None)
    return moved, {"exp_avg": _source(moved, momentum[0], v - moved @ (moved.mH @ v), o), **kept}


def _mean(w: Tensor, g: Tensor, s: State, o: Group) -> tuple[Tensor, Tensor, Tensor]:
    m = o["momentum"] * s.get("momentum_buffer", 0) + (1 - o["momentum"]) * g
    along = w.mH @ m
    return m, m - w @ (along + along.mH) / 2, along - along.mH


def _muon(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    m, _, turn = _mean(w, g, s, o)
    sizes = torch.linalg.svdvals(turn)  # of which those below 1e-3 of the largest do not come out as 1
    if w.shape[-1] == w.shape[-2] and bool((sizes[..., -1] > 2e-3 * sizes[..., 0]).all()):
        best = w @ _sign(turn)
    else:
        best = sk.functional.spectral_direction(w, m, iterations=o["iterations"])[0]
    return _sign(w - o["lr"] * best), {"momentum_buffer": m}


def _spel(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    m, along, _ = _mean(w, g, s, o)
    sizes = torch.linalg.svdvals(along)  # as of Muon
    is_whole = bool((sizes[..., -1] > 2e-3 * sizes[..., 0]).all())
    best = _sign(along) if is_whole else sk.functional.msign(along, precision="fast")
    return _sign(w - o["lr"] * best), {"momentum_buffer": m}


def _landing(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    g = _with_momentum(g, s, o)
    along = w.mH @ g
    both = (along + along.mH) / 2
    field = g - w @ (along.mH if o["manifold"].endswith("canonical") else both)
    step = (math.sqrt(0.5) / _norm(field)).clamp(max=o["lr"])
    return _sign(w - step * field), {"momentum_buffer": g - w @ both}


def _pogo(w: Tensor, g: Tensor, s: State, o: Group) -> Step:
    r, m, moments = torch.ones((), dtype=torch.float64), o["betas"][0] * s.get("exp_avg", 0) + g, {}
    if o["base"] == "adam":
        m, r, moments = _moments(g, s, o, lambda v: v.sqrt() + o["eps"])
    turn, rest = _parts(w, m, o)
    along = w @ turn + rest
    step = torch.minimum(o["lr"] / r, math.sqrt(w.shape[-1]) / _norm(along))
    off = (step * step) * _norm(along.mH @ along)
    step = torch.where(off > 0.5, step * (0.45 / off).sqrt(), step)
    return _sign(w - step * along), {"exp_avg": m if o["moment"] == "ambient" else _source(w, turn, rest, o), **moments}


OF_FRAMES: dict[str, Callable[[Tensor, Tensor, State, Group], Step]] = dict(
    CayleySGD=_cayley_sgd,
    SGDG=_cayley_sgd,
    CayleyAdam=_cayley_adam,
    MultiplicativeCayley=_multiplicative,
    StiefelSGD=_stiefel_sgd,
    StiefelAdam=_stiefel_adam,
    ManifoldMuon=_muon,
    SPEL=_spel,
    Landing=_landing,
    POGO=_pogo,
)
"""A step of frames W, by G, states and the settings of their group: where W goes, and the states that it leaves."""


def _step_of(name: str) -> Callable[[Tensor, Tensor, State, Group], Step]:
    """Returns the step of an optimizer in float64."""
    if name not in OF_FRAMES:
        raise LookupError(f"{name} needs its step in float64 in OF_FRAMES of benchmarks/fuzz/steps.py.")
    return OF_FRAMES[name]


def _free(kind: type, p: Tensor, g: Tensor, s: State, o: Group) -> Step:
    """A step of torch's optimizer, in the dtype of what it is given."""
    cls: Any = getattr(torch.optim, kind.__name__)
    known = inspect.signature(cls).parameters.keys() - {"params", "fused", "foreach"}
    q = nn.Parameter(p.clone())
    q.grad = g.clone()
    optimizer = cls([q], **{key: v for key, v in o.items() if key in known}, foreach=False)
    for key, value in s.items():
        is_count = key == "step" and not isinstance(value, Tensor)
        optimizer.state[q][key] = torch.tensor(float(value)) if is_count else value.clone()
    optimizer.step()
    return q.detach(), {}


class Retaken:
    """The next step of an optimizer in float64, from what it holds now; `off` compares what it has done with that.

    Each is retaken twice more, from parameters, gradients and states that differ by their rounding, by norm or, where
    torch's optimizers work entry by entry, by entry. Eight times what comes of that, and four units of rounding of the
    result, bound what the rounding of a step may do, whatever its condition.
    """

    def __init__(self, optimizer: Any, generator: torch.Generator):
        self.steps: list[tuple[str, Tensor, State, State, dict[str, float]]] = []
        for one in getattr(optimizer, "optimizers", [optimizer]):
            for group in one.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.numel() and p.dtype.itemsize > 2:
                        self._retake(one, group, p, generator)

    def _retake(self, one: Any, group: Group, p: Tensor, generator: torch.Generator) -> None:
        eps = torch.finfo(p.dtype).eps
        o = {**group, "eps of the frame": eps}
        o["lr"] = float(o["lr"])
        state = one.state.get(p, {})
        s = {key: exact(v) for key, v in state.items() if v is not None and key not in ("lo", "wear", "refused")}
        start, g = exact(p) + exact(state.get("lo", 0.0)), exact(p.grad)
        if group.get("manifold"):
            name, take = type(one).__name__, _step_of(type(one).__name__)
            g = -g if group["maximize"] else g
        else:
            kind = getattr(one, "free_optimizer", type(one))
            name, take = kind.__name__, lambda *given: _free(kind, *given)

        def near(value: Any) -> Any:
            return off_by(eps, value, generator, by_entry=not group.get("manifold"))

        to, after = take(start, g, dict(s), o)
        after = {"": to, **after}
        bounds = dict.fromkeys(after, 0.0)
        for _ in range(2):
            to, others = take(near(start), near(g), {key: near(v) for key, v in s.items()}, o)
            for key, t in {**others, "": to}.items():
                bounds[key] = max(bounds[key], torch.dist(after[key], t).item())
        for key, t in after.items():
            bounds[key] = 8 * bounds[key] + 4 * eps * max(t.norm().item(), 1e-3)
        self.steps.append((name, p, one.state[p], after, bounds))

    def off(self) -> list[tuple[str, float, float]]:
        """What was moved, how far from where it should be, and how far it may be."""
        found = []
        for name, p, state, after, bounds in self.steps:
            held = {**state, "": exact(p) + exact(state.get("lo", 0.0))}
            for key, t in after.items():
                if isinstance(held.get(key), Tensor) and held[key].shape == t.shape:
                    what = f"{name}: {key or 'a step'} of shape {tuple(p.shape)}"
                    found.append((what, torch.dist(exact(held[key]), t).item(), bounds[key]))
        return found
