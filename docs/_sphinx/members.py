"""One page for each parametrization, optimizer and minimizer: what it is, a picture, the facts, the class."""

import inspect
import json
from pathlib import Path

import citations
import reference
import torch
from torch.utils.flop_counter import FlopCounterMode

import stiefelkit as sk
from stiefelkit.contract.table import registered
from stiefelkit.errors import StiefelkitError
from stiefelkit.optim import minimizers, optimizers

SIZE = 8


def pages():
    """Returns file name to text of every page."""
    made = {}
    for folder, (title, intro, table, text) in KINDS.items():
        found = {name: cls for name, cls in table().items() if not cls.__module__.startswith("torch.")}
        made[f"{folder}/index.md"] = _index(title, intro, found)
        made |= {f"{folder}/{name}.md": text(name, cls) for name, cls in found.items()}
    return made


def draw(root: Path):
    """Draws the picture of each page that has none yet."""
    import pictures

    for folder, (_, _, table, _) in KINDS.items():
        for name, cls in table().items():
            path = root / folder / f"{name}.svg"
            is_drawn = folder == "parametrizations" or getattr(cls, "moves_frames", False)
            if is_drawn and not path.exists():
                pictures.save(folder, name, cls, path)


def _index(title, intro, found):
    rows = "\n".join(f"| [`{name}`]({name}.md) | {_sentence(cls)} | {_paper(cls)} |" for name, cls in found.items())
    names = "\n".join(found)
    table = f"| name | what it is | paper |\n|---|---|---|\n{rows}"
    return f"# {title}\n\n{intro}\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def _sentence(cls):
    return reference.first_sentence(cls).replace("|", "\\|")


def _paper(cls):
    entries = citations.references(inspect.getdoc(cls))
    keys = ",".join(citations.named(entries[0])) if entries else ""
    return f"{entries[0].rstrip('.')} {{cite:p}}`{keys}`" if keys else "".join(entries[:1]).rstrip(".")


def _instances(cls):
    """Returns "real, square" and the like to a small map, for what the class does."""
    made = {}
    for field, dtype in (("real", torch.float32), ("complex", torch.complex64)):
        for form, p in (("square", SIZE), ("tall", SIZE // 2)):
            try:
                if cls.supports((SIZE, p), dtype) is None:
                    made[field, form] = cls((SIZE, p), dtype=dtype)
            except (StiefelkitError, TypeError):
                continue
    return made


def _image(traits):
    if not traits.exact:
        return "near-orthogonal"
    if traits.onto:
        return "every frame"
    return "rotations, det = 1" if traits.component == "rotations" else "a part of the frames"


def _power(exponent):
    return f"n{'⁰¹²³⁴⁵⁶⁷⁸⁹'[int(exponent)]}" if exponent == int(exponent) else f"n^{exponent:g}"


def _yes(claim):
    return "yes" if claim else "no"


def _of_map(name, cls):
    rows = []
    for (field, _), param in _instances(cls).items():
        traits = param.traits
        sizes = ", ".join(f"`{key}` {' × '.join(map(str, shape))}" for key, shape in param.coordinates.items())
        shape = "\N{NO-BREAK SPACE}× ".join(map(str, param.shape)).replace("× ", "×\N{NO-BREAK SPACE}")
        rows.append(
            f"| {field}, {shape} | {_image(traits)} | {sizes} | {_yes(traits.invertible)} | "
            f"{_yes(traits.twice_differentiable)} | {_power(traits.cost_exponent)} |"
        )
        first = param
    facts = [
        "| frames | image | coordinates, shapes | takes an assigned frame | second derivatives | time grows as |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    more = [f"Initial draws: {', '.join(f'`{scheme}`' for scheme in first.schemes)}, the first by default."]
    more += [f"Precisions: {', '.join(f'`{precision}`' for precision in cls.precisions)}."]
    if measured := _measured().get(name):
        times = ", ".join(f"{_ms(row)} ms at {n} × {n}" for n, row in measured.items())
        more += [f"Forward and backward, exact: {times}; [what was measured](../../which.md#what-they-cost)."]
    if first.manifolds:
        more += ["Its coordinate is the frame itself: train it with [a Riemannian optimizer](../optimizers/index.md)."]
    snippet = f'layer = sk.orthogonal(nn.Linear(8, 8), "weight", "{name}")'
    if ("real", "square") not in _instances(cls):
        snippet = f'layer = sk.orthogonal(nn.Linear(8, 8, dtype=torch.complex64), "weight", "{name}")'
    return _page(name, cls, snippet, [*facts, "", *more], MAP_READING)


def _of_optimizer(name, cls):
    facts = ["| setting | default |", "|---|---|"]
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.default is not parameter.empty:
            facts.append(f"| `{parameter.name}` | `{parameter.default}` |")
    if not getattr(cls, "moves_frames", False):
        return _page(name, cls, f"opt = sk.optim.{cls.__name__}(model.parameters(), lr=1e-3)", facts, "")
    plain = getattr(cls, "free_optimizer", None)
    moves = f"It moves all other parameters as `torch.optim.{plain.__name__}` does." if plain else ""
    snippet = f"opt = sk.optim.{cls.__name__}(sk.optim.parameter_groups(model, lr=1e-3))"
    facts = [*([moves, ""] if moves else []), *facts, "", *_steps(cls), "", STEP_READING]
    return _page(name, cls, snippet, facts, OPTIMIZER_READING)


def _steps(cls, steps=10):
    """A table of what a step takes, counted while frames of two shapes take some."""
    rows = ["| a step of | products | numbers kept |", "|---|---|---|"]
    for n, p in ((256, 256), (512, 32)):
        generator = torch.Generator().manual_seed(0)
        w = torch.nn.Parameter(sk.init.haar((n, p), generator=generator).float())
        opt, a, operations = optimizer_of("optimizers", cls, w), torch.randn(n, n, generator=generator), 0
        for step in range(steps + 1):
            w.grad = (a @ w).detach() / (10 * n)
            with FlopCounterMode(display=False) as counter:
                opt.step()
            operations += counter.get_total_flops() if step else 0
        kept = sum(value.numel() for value in opt.state[w].values() if torch.is_tensor(value) and value.dim())
        rows.append(f"| {n} × {p} | {operations / (steps * 2 * n * p * p):.1f} | {kept / (n * p):.2g} |")
    return rows


def optimizer_of(kind, cls, w):
    """Returns an optimizer, or a minimizer, of one frame, whatever its call."""
    if kind == "minimizers":
        return cls(sk.optim.frames([w]), max_iter=1)
    rate = {"lr": 0.05}
    try:
        return cls(sk.optim.frames([w]), **rate)
    except StiefelkitError:
        return cls([w], stiefel=True, **rate)


def _of_minimizer(name, cls):
    snippet = f'found = sk.optim.minimize(f, sk.init.haar((20, 3)), "{name}")'
    facts = ["| setting | default |", "|---|---|"]
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.default is not parameter.empty:
            facts.append(f"| `{parameter.name}` | `{parameter.default}` |")
    return _page(name, cls, snippet, [*facts, "", *_way(name), "", WAY_READING], OPTIMIZER_READING)


def _way(name):
    """A table of what a minimum takes, counted."""
    rows = ["| frame | iterations | evaluations | products with the Hessian | operations |", "|---|---|---|---|---|"]
    for n, p in ((100, 10), (512, 32)):
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(n, n, generator=generator, dtype=torch.float64)
        a = (a + a.mT) / (2 * n**0.5)
        start = sk.init.haar((n, p), generator=generator, dtype=torch.float64)
        with FlopCounterMode(display=False) as counter:
            found = sk.optim.minimize(lambda w, a=a: (w * (a @ w)).sum(), start, name, tolerance_grad=1e-4)
        rows.append(
            f"| {n} × {p} | {found.iterations} | {found.evaluations} | {found.products} | "
            f"{counter.get_total_flops() / 2e6:,.0f} million |"
        )
    return rows


def _page(name, cls, snippet, facts, reading):
    picture = [f"![What {name} does]({name}.svg)", "", reading, ""] if reading else []
    directive = ["```{eval-rst}", f".. autoclass:: {cls.__module__}.{cls.__qualname__}", "   :members:", "```"]
    lines = [f"# `{name}`", "", "```py", snippet, "```", "", *picture, *facts, "", *directive, ""]
    return "\n".join(lines)


MAP_READING = (
    "Left: the map. Middle: the entries of a frame that it draws. Right: the eigenvalues of W while the coordinates "
    "grow from zero to that draw; those of orthogonal and unitary matrices lie on the unit circle."
)
STEP_READING = (
    "The table counts products of n × p with p × p numbers, $n p^2$ multiplications each, as a mean over ten steps of "
    "a float32 frame, without decompositions of p × p matrices; and the numbers in the state for each entry of W. "
    "[Times](../../optimizers.md#what-they-cost)."
)
WAY_READING = (
    "The search starts at a random frame and ends where the gradient of $tr(W^T A W)$, A symmetric, random and of norm "
    "1.4, is shorter than 1e-4; float64. Operations are the multiplications of all matrix products, the loss included."
)
OPTIMIZER_READING = (
    "Left: the path of a unit vector, a 3 × 1 frame, to the leading eigenvector of a symmetric matrix. Middle: the "
    "loss above its minimum. Right: $‖W^H W - I‖_F$ of a 16 × 4 frame in rounding limits, step by step."
)

KINDS = {
    "parametrizations": (
        "Parametrizations",
        "One page each. [Which parametrization](../../which.md) helps you to choose.",
        registered.available,
        _of_map,
    ),
    "optimizers": (
        "Optimizers",
        "One page each. [Train on frames](../../frames.md) helps you to choose; [formulas and costs]"
        "(../../optimizers.md) has what they share.",
        optimizers.available,
        _of_optimizer,
    ),
    "minimizers": (
        "Minimizers",
        "For losses that give the same value at every evaluation: [Minimize a loss without noise](../../minimize.md).",
        minimizers.available,
        _of_minimizer,
    ),
}


def _measured():
    """Returns map to size to the row that `python -m benchmarks.beside_peers` has left."""
    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "beside-peers.json").read_text())["time"]
    return {
        name: {row["n"]: row for row in rows if row["contender"] == f"{name} (exact)"} for name in registered.names()
    }


def cost():
    """The table of measured times, from the figures that `python -m benchmarks.beside_peers` has left."""
    ours = _measured()
    sizes = sorted({n for by_size in ours.values() for n in by_size})
    head = "".join(f" | {n} × {n}: ms | faster than the best peer" for n in sizes)
    lines = [f"| map{head} |", "|---" + "|---|---" * len(sizes) + "|"]
    for name, by_size in ours.items():
        if by_size:
            cells = "".join(f" | {_ms(by_size.get(n))} | {_times(by_size.get(n))}" for n in sizes)
            lines.append(f"| [`{name}`](generated/parametrizations/{name}.md){cells} |")
    return "\n".join(
        [
            "Milliseconds of process CPU time on one core of a busy 2-core x86 machine for a square map and its "
            "gradient, float32 (`fourier`: complex64), exact, torch 2.13; and how many times as long the fastest peer "
            "of the same map takes:",
            "",
            *lines,
            "",
        ]
    )


def _ms(row):
    return f"{1e3 * row['seconds']:.3g}" if row else ""


def _times(row):
    return f"{row['ratio_to_best_peer']:.2g}" if row and row["ratio_to_best_peer"] else "no peer"
