"""The picture of each parametrization and optimizer, drawn by running it; by itself, this draws that of the idea.

A parametrization has a drawing of its own in `DRAWINGS`, by its registered name, or else `_letter`, which serves all.
"""

import math
from pathlib import Path

import matplotlib

from stiefelkit.contract.param import load_chart_

matplotlib.use("Agg")
matplotlib.rc_file(Path(__file__).parent.parent / "_static" / "matplotlibrc")

import torch  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402
from members import optimizer_of  # noqa: E402

import stiefelkit as sk  # noqa: E402
from stiefelkit.errors import StiefelkitError  # noqa: E402
from stiefelkit.metrics import orthogonality_error, rounding_limit  # noqa: E402

GREY, BLUE, RED, GREEN = "#7f868f", "#3b8bd9", "#e0763a", "#3fa373"
SIGNED = LinearSegmentedColormap.from_list("signed", [BLUE, GREY, RED])  # is seen on white and on black


def save(kind, name, cls, path):
    """Draws one picture into an SVG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        figure = plt.figure(figsize=(7.6, 2.5))
        _map(figure, name, cls) if kind == "parametrizations" else _optimizer(figure, kind, cls)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _map(figure, name, cls):
    does, entries, spectrum = figure.subplots(1, 3)
    param = _instance(cls, 16, **PICTURED.get(name, {}))
    coordinates, chart = param.initial(param.schemes[0], torch.Generator().manual_seed(1))
    load_chart_(param, chart)
    w = param(*coordinates)
    DRAWINGS.get(name, _letter)(does, cls)
    shown = w.real if w.is_complex() else w
    entries.imshow(shown.detach(), vmin=-0.8, vmax=0.8)
    entries.set(title="W, 16 × 16" + (", real part" if w.is_complex() else ""), xticks=[], yticks=[])
    _spectrum(spectrum, param, coordinates)


PICTURED = {"block_diagonal": {"blocks": 4}}
"""Options of a map without which its picture would show nothing of its own."""


def _instance(cls, n, **options):
    for dtype in (torch.float32, torch.complex64):
        if cls.supports((n, n), dtype) is None:
            try:
                return cls((n, n), dtype=dtype, **options)
            except StiefelkitError:
                continue
    raise StiefelkitError(f"A picture needs a map of {n} x {n} frames, got {cls.__name__}.")


def _spectrum(axes, param, coordinates):
    _circle(axes)
    on_manifold = any(name in param.manifolds for name in param.coordinates)
    for step in [1.0] if on_manifold else torch.linspace(0, 1, 24).tolist():
        values = torch.linalg.eigvals(param(*(step * c for c in coordinates)).detach().to(torch.complex128))
        last = step == 1.0
        axes.plot(
            values.real, values.imag, "o", ms=4 if last else 1.5, color=BLUE if last else GREY, alpha=1 if last else 0.6
        )
    axes.set_title("eigenvalues of W")


def _circle(axes, bound=1.25):
    axes.add_patch(plt.Circle((0, 0), 1, fill=False, color=GREY, lw=0.7))
    axes.set(xlim=(-bound, bound), ylim=(-bound, bound), aspect="equal")
    axes.axis("off")


LETTER = torch.tensor(
    [[0, 0], [0, 1.0], [0.55, 1.0], [0.55, 0.8], [0.2, 0.8], [0.2, 0.6], [0.45, 0.6], [0.45, 0.4], [0.2, 0.4], [0.2, 0]]
)


def _letter(axes, cls):
    """A letter, turned and reflected by 2 × 2 frames, or the way of W's first entry in the complex plane."""
    param = _instance(cls, 2)
    _circle(axes, 1.5)
    coordinates, chart = param.initial(param.schemes[0], torch.Generator().manual_seed(3))
    load_chart_(param, chart)
    if param.is_complex:
        ways = [param(*(t * c for c in coordinates)).detach()[:, 0] for t in torch.linspace(0, 1, 40)]
        for row, colour in zip(torch.stack(ways).T, (BLUE, RED), strict=True):
            axes.plot(row.real, row.imag, color=colour)
            axes.plot(row[-1].real, row[-1].imag, "o", color=colour)
        axes.set_title("a column of W on its way")
        return
    for index, t in enumerate(torch.linspace(0, 1, 5).tolist()):
        still = bool(param.manifolds)
        w = param(*(coordinates if still else [t * c for c in coordinates])).detach()
        moved = LETTER @ (w.mT if not still or index else torch.eye(2))
        axes.add_patch(plt.Polygon(moved, closed=True, alpha=0.2 + 0.15 * index, color=BLUE if t == 1 else GREY, lw=0))
    axes.set_title("W of 2 × 2 applied to an F")


def _of_the_line(angle_of):
    """Eigenvalues i α of A on a line, and where the map sends them on the circle."""

    def drawn(axes, cls):
        _circle(axes)
        alphas = torch.linspace(-4, 4, 33)
        angles = angle_of(alphas)
        for alpha, angle in zip(alphas.tolist(), angles.tolist(), strict=True):
            colour = SIGNED((alpha + 4) / 8)
            axes.plot([1.6, math.cos(angle)], [alpha * 0.3, math.sin(angle)], color=colour, lw=0.5)
            axes.plot(1.6, alpha * 0.3, ".", color=colour, ms=3)
            axes.plot(math.cos(angle), math.sin(angle), "o", color=colour, ms=3.5)
        axes.set(xlim=(-1.2, 1.8), ylim=(-1.35, 1.35), title="eigenvalues: of A, line; of W, circle")

    return drawn


def _reflections(axes, cls):
    """An F, reflected in one line and then in another, which is a rotation."""
    _circle(axes, 1.5)
    shape = LETTER
    for angle, colour in ((0.5, RED), (1.4, BLUE)):
        normal = torch.tensor([math.cos(angle), math.sin(angle)])
        axes.add_patch(plt.Polygon(shape, closed=True, color=GREY, alpha=0.35, lw=0))
        shape = shape - 2 * (shape @ normal)[:, None] * normal
        mirror = 1.4 * torch.tensor([[normal[1], -normal[0]], [-normal[1], normal[0]]])
        axes.plot(mirror[:, 0], mirror[:, 1], color=colour, ls="--")
    axes.add_patch(plt.Polygon(shape, closed=True, color=BLUE, alpha=0.7, lw=0))
    axes.set_title("two reflectors: H₂ H₁")


def _mesh(axes, cls):
    """Wires that cross in layers of rotations."""
    wires, layers = 6, 6
    for wire in range(wires):
        axes.plot([-0.6, layers - 0.4], [wire, wire], color=GREY, lw=0.8)
    for layer in range(layers):
        for top in range(layer % 2, wires - 1, 2):
            axes.plot([layer, layer], [top, top + 1], color=BLUE, lw=2)
            axes.plot([layer, layer], [top, top + 1], "o", color=BLUE, ms=3)
    axes.set(title="layers of plane rotations")
    axes.axis("off")


def _factors(axes, cls):
    """Phases, reflectors, a permutation and Fourier transforms, as pictures of their entries."""
    n = 8
    random = torch.Generator().manual_seed(0)
    phases = torch.diag(torch.exp(1j * 6.28 * torch.rand(n, generator=random)))
    u = torch.randn(n, 1, generator=random)
    reflector = torch.eye(n) - 2 * u @ u.T / (u**2).sum()
    fourier = torch.fft.fft(torch.eye(n, dtype=torch.complex64), norm="ortho")
    permutation = torch.eye(n)[torch.randperm(n, generator=random)]
    factors = [("D₃", phases), ("R₂", reflector), ("F⁻¹", fourier.mH), ("D₂", phases), ("P", permutation)]
    factors += [("R₁", reflector), ("F", fourier), ("D₁", phases)]
    for index, (label, factor) in enumerate(factors):
        left, top = (index % 4) * 1.2, -(index // 4) * 1.5
        axes.imshow(factor.real, extent=(left, left + 1, top, top + 1), vmin=-1, vmax=1)
        axes.text(left + 0.5, top + 1.05, label, ha="center", fontsize=8)
    axes.set(xlim=(-0.1, 4.7), ylim=(-1.6, 1.5), title="W, factor by factor")
    axes.axis("off")


def _ellipses(axes, cls):
    """What becomes of the unit circle within a margin of 1."""
    _circle(axes, 1.5)
    angle = torch.linspace(0, 2 * math.pi, 200)
    circle = torch.stack([angle.cos(), angle.sin()])
    for turn, scales, colour in ((0.4, (1.3, 0.8), BLUE), (1.7, (1.15, 0.7), RED)):
        u = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
        drawn = u @ torch.diag(torch.tensor(scales)) @ circle
        axes.plot(*drawn, color=colour)
    axes.set_title("the unit circle under U diag(s) V^H")


def _from_a_base(axes, cls):
    """A circle with a base, and the coordinates around it, which begin at zero again after each re-basing."""
    _circle(axes, 1.5)
    for base, colour in ((0.3, GREY), (1.5, RED), (2.7, BLUE)):
        spread = torch.linspace(-0.55, 0.55, 40) + base
        axes.plot(1.08 * spread.cos(), 1.08 * spread.sin(), color=colour, lw=4, alpha=0.7)
        axes.plot(math.cos(base), math.sin(base), "o", color=colour)
    axes.annotate("sk.rebase_", (-0.2, 1.18), ha="center", color=GREY, fontsize=8)
    axes.set_title("the base moves, coordinates stay small")


DRAWINGS = {
    "cayley": _of_the_line(lambda alpha: -2 * torch.atan(alpha)),
    "matrix_exp": _of_the_line(lambda alpha: alpha),
    "householder": _reflections,
    "givens": _mesh,
    "fourier": _factors,
    "margin": _ellipses,
    "rebased": _from_a_base,
}


def _optimizer(figure, kind, cls):
    sphere, loss, drift = figure.add_subplot(131, projection="3d"), figure.add_subplot(132), figure.add_subplot(133)
    a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    start = torch.tensor([[0.85], [0.5], [-0.16]], dtype=torch.float64)
    points, values, _ = _run(kind, cls, a, start / start.norm(), 60)
    _sphere(sphere, torch.stack(points)[:, :, 0])
    loss.semilogy([max(value + 4.0, 1e-16) for value in values], color=BLUE)
    loss.set(title="loss − least loss", xlabel="step")
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    w = sk.init.haar((16, 4), generator=torch.Generator().manual_seed(1)).float()
    errors = _run(kind, cls, a + a.T, w, 200)[2]
    drift.plot([error / rounding_limit(4, torch.float32) for error in errors], color=GREEN)
    drift.set(title="orthogonality error / limit", xlabel="step")
    drift.set_ylim(bottom=0)


def _run(kind, cls, a, start, steps):
    w = torch.nn.Parameter(start.clone())
    points, values, errors = [w.detach().clone()], [-torch.trace(w.T @ a @ w).item()], [orthogonality_error(w).item()]
    optimizer = optimizer_of(kind, cls, w)
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            value = -torch.trace(w.T @ a @ w)
            value.backward()
            return value

        if kind == "minimizers":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        points.append(w.detach().clone())
        values.append(-torch.trace(w.T @ a @ w).item())
        errors.append(orthogonality_error(w).item())
    return points, values, errors


def _sphere(axes, points):
    u, v = torch.meshgrid(torch.linspace(0, 2 * math.pi, 25), torch.linspace(0, math.pi, 13), indexing="ij")
    axes.plot_wireframe(u.cos() * v.sin(), u.sin() * v.sin(), v.cos(), color=GREY, lw=0.3, alpha=0.5)
    x, y, z = 1.01 * points.T
    axes.plot(x, y, z, color=BLUE, lw=1.5)
    axes.plot(x, y, z, ".", color=BLUE, ms=3)
    axes.plot(*([value] for value in (0, 0, 1.02 if z[-1] > 0 else -1.02)), "*", color=RED, ms=8)
    axes.set(title="its way on a sphere")
    axes.set_box_aspect((1, 1, 1), zoom=1.5)
    axes.view_init(12, 40 if z[-1] > 0 else 20)
    axes.axis("off")


def idea(path, narrow=False):
    """What a matrix does to a circle when it is applied again and again: a frame keeps it, another does not."""
    if narrow:
        figure, axes = plt.subplot_mosaic("ab;cc", figsize=(3.8, 4.2))
    else:
        figure, axes = plt.subplot_mosaic("abc", figsize=(7.6, 2.4), width_ratios=(1, 1, 1.4))
    plain, frame, norms = axes.values()
    angle = torch.linspace(0, 2 * math.pi, 200)
    circle = torch.stack([angle.cos(), angle.sin()])
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]])
    shear = turn @ torch.tensor([[1.2, 0.25], [0.0, 0.85]])
    for axes, w, title in ((plain, shear, "h, W h, W² h, W³ h: any W"), (frame, turn, "the same: a frame W")):
        for power in range(4):
            moved = torch.linalg.matrix_power(w, power)
            axes.plot(*(moved @ circle), color=BLUE if axes is frame else RED, alpha=0.35 + 0.2 * power, lw=1)
            axes.annotate("", moved[:, 0], (0, 0), arrowprops={"arrowstyle": "->", "color": GREY, "lw": 1})
        axes.set(xlim=(-2.1, 2.1), ylim=(-2.1, 2.1), aspect="equal", title=title)
        axes.axis("off")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=generator)
    square = torch.randn(64, 64, generator=generator) / 8
    for w, label, colour in (
        (0.7 * square, "Gaussian W × 0.7", RED),
        (1.1 * square, "Gaussian W × 1.1", "#d9534f"),
        (sk.init.haar((64, 64), generator=generator).float(), "frame", BLUE),
    ):
        h, lengths = start, []
        for _ in range(100):
            lengths.append((h.norm() / start.norm()).item())
            h = w @ h
        norms.semilogy(lengths, color=colour, label=label)
    norms.set(title="‖Wᵗ h‖ / ‖h‖, 64 × 64", xlabel="t")
    norms.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


CHOICES = (
    ("a loss without noise?", "sk.optim.minimize"),
    ("a trained layer, frozen?", "sk.nn.adapt(..., block_size=32)"),
    ("a recurrent net?", "sk.nn.RotationRNN if time is fixed,\nOrthogonalRNN; LSTM for language"),
    ("momentum on the manifold?", '"stiefel" and CayleyAdam'),
    ("many channels, cheaply?", '"householder", "givens", "hadamard"'),
    ("", '"cayley" and Adam'),
)
"""Questions, and what a yes takes; the last stands where every answer was no."""


def choice(path):
    """The questions that lead to a map, an optimizer or a net, one below the other."""
    figure, axes = plt.subplots(figsize=(6.4, 4.6))
    box = {"boxstyle": "round,pad=0.5", "fc": "none"}
    for row, (question, answer) in enumerate(CHOICES):
        asked = {"va": "center", "ha": "center", "fontsize": 10}
        if question:
            axes.text(0, -row, question, bbox=box | {"ec": GREY}, **asked)
            axes.annotate("", (0.85, -row), (0.62, -row), arrowprops={"arrowstyle": "->", "color": GREY})
            axes.text(0.72, 0.13 - row, "yes", color=GREY, fontsize=9, ha="center")
            axes.annotate("", (0, -row - 0.7), (0, -row - 0.3), arrowprops={"arrowstyle": "->", "color": GREY})
            axes.text(0.05, -row - 0.5, "no", color=GREY, fontsize=9, va="center")
        place = 1.6 if question else 0
        axes.text(place, -row, answer, bbox=box | {"ec": BLUE}, color=BLUE, **asked)
    axes.set(xlim=(-0.65, 2.4), ylim=(0.5 - len(CHOICES), 0.5))
    axes.axis("off")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    images = Path(__file__).parents[1] / "images"
    idea(images / "idea.svg")
    idea(images / "idea-narrow.svg", narrow=True)
    choice(images / "which.svg")
