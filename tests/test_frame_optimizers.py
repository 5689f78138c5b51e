"""What every optimizer of frames keeps: its formula, orthogonality, torch's habits, and all or nothing."""

import contextlib
import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing import lowered_products, seeds

OPTIMIZERS = {
    "MultiplicativeCayley": sk.optim.MultiplicativeCayley,
    "CayleySGD": sk.optim.CayleySGD,
    "CayleyAdam": sk.optim.CayleyAdam,
    "POGO": sk.optim.POGO,
}
STATEFUL = {
    "MultiplicativeCayley": dict(precondition="rmsprop", momentum=0.9),
    "CayleySGD": {},
    "CayleyAdam": {},
    "POGO": dict(base="adam"),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
METRICS = ["canonical", "euclidean"]


def frame(shape, dtype=torch.float32, seed=0):
    exact = init.haar(shape, working_dtype(dtype), seeds.generator(seed))
    return nn.Parameter(exact.to(dtype))


def gradient(shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, dtype=dtype, generator=seeds.generator(seed)) / shape[-2] ** 0.5


def group(*params, metric="canonical", **settings):
    return [{"params": list(params), "manifold": f"stiefel:{metric}", **settings}]


def excess(w):
    return orthogonality_error(w).max().item() / rounding_limit(w.shape[-1], w.dtype)


def generator_of(w, m, metric):
    """The n x n skew A with A W = the Riemannian gradient that belongs to M."""
    if metric == "canonical":
        return m @ w.mH - w @ m.mH
    inner = m @ w.mH - 0.5 * w @ (w.mH @ m @ w.mH)
    return inner - inner.mH


def cayley(a, w):
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    return torch.linalg.solve(eye + a / 2, (eye - a / 2) @ w)


def run(optimizer, w, gradients):
    for g in gradients:
        w.grad = g.clone()
        optimizer.step()


SHAPES = [(6, 6), (7, 3), (5, 4), (4, 1), (1, 1), (9, 5)]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lr", [1e-3, 0.1, 3.0])
def test_the_multiplicative_update_is_the_n_by_n_cayley_transform(shape, dtype, metric, lr):
    w = frame(shape, dtype)
    expected = w.detach().clone()
    optimizer = sk.optim.MultiplicativeCayley(group(w, metric=metric), lr=lr)
    for seed in range(4):
        g = gradient(shape, dtype, seed)
        expected = cayley(lr * generator_of(expected, g, metric), expected)
        run(optimizer, w, [g])
    assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (7, 3)], ids=str)
def test_the_right_side_turns_the_frame_within_its_columns(shape, dtype):
    w, g = frame(shape, dtype), gradient(shape, dtype)
    b = w.mH @ g - g.mH @ w
    expected = (w @ cayley(0.3 * b, torch.eye(shape[-1], dtype=dtype))).detach()
    left = nn.Parameter(w.detach().clone())
    run(sk.optim.MultiplicativeCayley(group(w), lr=0.3, side="right"), w, [g])
    assert torch.dist(w, expected) < 1e-12
    run(sk.optim.MultiplicativeCayley(group(left), lr=0.3), left, [g])
    assert (torch.dist(w, left) < 1e-12) == (shape[0] == shape[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
def test_preconditioning_divides_real_and_imaginary_parts_by_their_own_mean_squares(shape, dtype):
    w, lr, squares = frame(shape, dtype), 0.01, 0.0
    expected = w.detach().clone()
    optimizer = sk.optim.MultiplicativeCayley(group(w), lr=lr, precondition="rmsprop", alpha=0.8, eps=1e-3)
    for seed in range(3):
        g = gradient(shape, dtype, seed)
        run(optimizer, w, [g])
        parts = torch.view_as_real(g) if dtype.is_complex else g
        squares = 0.8 * squares + 0.2 * parts**2
        scaled = parts / (squares**0.5 + 1e-3)
        m = torch.view_as_complex(scaled) if dtype.is_complex else scaled
        expected = cayley(lr * generator_of(expected, m, "canonical"), expected)
    assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
def test_momentum_is_projected_on_each_tangent_space(shape, dtype, metric):
    for make in (sk.optim.MultiplicativeCayley, sk.optim.CayleySGD):
        w, lr, m = frame(shape, dtype), 0.05, 0.0
        expected = w.detach().clone()
        optimizer = make(group(w, metric=metric), lr=lr, momentum=0.9)
        for seed in range(4):
            g = gradient(shape, dtype, seed)
            run(optimizer, w, [g])
            m = 0.9 * m + g
            inner = expected.mH @ m
            moved = cayley(lr * generator_of(expected, m, metric), expected)
            m = m - expected @ (inner + inner.mH) / 2
            expected = moved
        assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
@pytest.mark.parametrize("lr", [0.05, 2.0])
def test_cayley_sgd_is_algorithm_1_of_its_paper(shape, dtype, lr):
    w, m = frame(shape, dtype), 0.0
    expected = w.detach().clone()
    optimizer = sk.optim.CayleySGD(group(w, metric="euclidean"), lr=lr, momentum=0.9, q=0.4)
    for seed in range(4):
        g = gradient(shape, dtype, seed)
        run(optimizer, w, [g])
        m = 0.9 * m - g
        a = generator_of(expected, m, "euclidean")
        m = a @ expected
        step = min(lr, 2 * 0.4 / torch.linalg.matrix_norm(a).item())
        expected = cayley(-step * a, expected)
    assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("lr", [0.1, 4.0])
def test_cayley_adam_is_algorithm_2_of_its_paper(shape, dtype, lr):
    w = frame(shape, dtype)
    starts = w.detach().clone().reshape(-1, *shape[-2:])
    optimizer = sk.optim.CayleyAdam(group(w, metric="euclidean"), lr=lr, betas=(0.9, 0.95), eps=1e-5)
    seeds = range(4)
    run(optimizer, w, [gradient(shape, dtype, seed) for seed in seeds])
    for i, expected in enumerate(starts):
        m, v = 0.0, 0.0
        for k, seed in enumerate(seeds, 1):
            g = gradient(shape, dtype, seed).reshape(-1, *shape[-2:])[i]
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * torch.linalg.matrix_norm(g).item() ** 2
            r = (1 - 0.9**k) * math.sqrt(v / (1 - 0.95**k) + 1e-5)
            a = generator_of(expected, m, "euclidean") / r
            m = r * a @ expected
            step = min(lr, 1 / torch.linalg.matrix_norm(a).item())
            expected = cayley(step * a, expected)
        assert torch.dist(w.detach().reshape(-1, *shape[-2:])[i], expected) < 1e-12


@pytest.mark.parametrize("base", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
def test_pogo_is_a_tangent_step_and_one_step_back(shape, dtype, base):
    w, m, v, lr = frame(shape, dtype), 0.0, 0.0, 0.01
    expected, eye = w.detach().clone(), torch.eye(shape[-1], dtype=dtype)
    optimizer = sk.optim.POGO(group(w, metric="euclidean"), lr=lr, base=base, moment="ambient", precision="fast")
    for k in range(1, 5):
        g = gradient(shape, dtype, k)
        run(optimizer, w, [g])
        m = 0.9 * m + (0.1 if base == "adam" else 1.0) * g
        v = 0.999 * v + 0.001 * torch.linalg.matrix_norm(g).item() ** 2
        scale = 1.0 if base == "sgd" else 1 / ((1 - 0.9**k) * (math.sqrt(v / (1 - 0.999**k)) + 1e-8))
        inner = expected.mH @ m
        x = expected - lr * scale * (m - expected @ (inner + inner.mH) / 2)
        expected = x - x @ (x.mH @ x - eye) / 2
    assert torch.dist(w, expected) < 1e-6


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (40, 40), (50, 7), (3, 8, 5)], ids=str)
def test_a_step_in_single_precision_is_that_in_double(name, shape, dtype):
    for lr in (1e-4, 1e-2, 0.5):
        single, exact = frame(shape, dtype), frame(shape, working_dtype(dtype))
        g = gradient(shape, dtype)
        for w in (single, exact):
            run(OPTIMIZERS[name](group(w), lr=lr), w, [g.to(w.dtype)])
        assert torch.dist(single.detach().to(exact.dtype), exact) < 3e-6 * math.sqrt(single.numel() / shape[-2])


@every_optimizer
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(24, 24), (60, 10)], ids=str)
@pytest.mark.parametrize("length", [1e-3, 0.1, 1.0])
def test_frames_stay_frames(name, precision, dtype, shape, length):
    w = frame(shape, dtype)
    optimizer = OPTIMIZERS[name](group(w), lr=length, precision=precision)
    bound = 20.0 if dtype == torch.float64 else {"exact": 2.0, "fast": 30.0}[precision]
    if name == "POGO" and precision == "fast":
        bound = 0.2 / rounding_limit(shape[-1], dtype)  # says that it is off by the fourth power of the step
    worst = 0.0
    for seed in range(60):
        g = gradient(shape, dtype, seed % 5)
        run(optimizer, w, [g])
        worst = max(worst, excess(w))
    slack = torch.finfo(dtype).eps / rounding_limit(shape[-1], dtype)
    assert worst <= bound + slack


@every_optimizer
def test_other_parameters_are_moved_as_torch_does(name):
    plain = {
        "MultiplicativeCayley": (torch.optim.RMSprop, dict(alpha=0.9, momentum=0.5), dict(momentum=0.5)),
        "CayleySGD": (torch.optim.SGD, dict(momentum=0.9), {}),
        "CayleyAdam": (torch.optim.Adam, dict(betas=(0.9, 0.99)), {}),
        "POGO": (torch.optim.Adam, {}, {}),
    }
    theirs, their_options, options = plain[name]
    net = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
    other = nn.Parameter(net.bias.detach().clone())
    ours = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.1), **options, weight_decay=0.01)
    alone = theirs([other], lr=0.1, weight_decay=0.01, **their_options)
    for seed in range(4):
        net.bias.grad = gradient((1, 4), seed=seed)[0]
        other.grad = net.bias.grad.clone()
        ours.step()
        alone.step()
    assert torch.equal(net.bias, other)
    assert excess(net.weight) < 2


@every_optimizer
def test_training_resumes_to_the_same_bits(name):
    def start():
        seeds.reseed()
        net = nn.Sequential(
            sk.orthogonal(nn.Linear(6, 6), "weight", "stiefel"), sk.orthogonal(nn.Linear(6, 4), "weight", "stiefel")
        )
        optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=1e-2, stiefel=dict(lr=0.1)), **STATEFUL[name])
        return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def advance(net, optimizer, schedule, steps):
        for step in steps:
            x = torch.randn(3, 6, generator=seeds.generator(step))
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
            schedule.step()

    whole = start()
    advance(*whole, range(12))
    half = start()
    advance(*half, range(7))
    stream = io.BytesIO()
    torch.save([part.state_dict() for part in half], stream)
    stream.seek(0)
    other = start()
    advance(*other, range(3))  # so that there is something to replace
    for part, state in zip(other, torch.load(stream, weights_only=True), strict=True):
        part.load_state_dict(state)
    advance(*other, range(7, 12))
    for a, b in zip(whole[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(a, b)


@every_optimizer
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(name, count, bad):
    net = nn.Sequential(*(sk.orthogonal(nn.Linear(4 + i, 4 + i), "weight", "stiefel") for i in range(count)))
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.1), **STATEFUL[name])
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()["state"]))
    (w,) = sk.coordinates(net[-1], "weight").values()
    assert w.grad is not None
    w.grad[0, 0] = bad
    with pytest.raises(errors.NonFiniteError, match=r"Linear\.weight"):
        optimizer.step()
    after = (net.state_dict(), optimizer.state_dict()["state"])
    for old, new in zip(before, after, strict=True):
        for a, b in zip(_leaves(old), _leaves(new), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    return [tree]


@every_optimizer
def test_closures_missing_gradients_and_frozen_groups(name):
    first, second = frame((5, 5)), frame((5, 5), seed=3)
    kept = second.detach().clone()
    groups = [*group(first), *group(second)]
    optimizer = OPTIMIZERS[name](groups, lr=0.1)

    def closure():
        optimizer.zero_grad(set_to_none=True)
        loss = (first - torch.eye(5)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert torch.equal(second, kept)
    second.requires_grad_(False)
    optimizer.step(closure)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert torch.equal(second, kept)


@every_optimizer
def test_a_grad_scaler_skips_what_overflowed_and_unscales_the_rest(name):
    seeds.reseed()
    net = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # pyright: ignore[reportPrivateImportUsage]
    twin = copy.deepcopy(net)
    other = OPTIMIZERS[name](sk.optim.parameter_groups(twin, lr=0.1))
    before = net.weight.detach().clone()
    scaler.scale(net(torch.full((4,), math.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(net.weight, before)
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(4)).square().sum()).backward()
    scaler.step(optimizer)
    twin(torch.ones(4)).square().sum().backward()
    other.step()
    assert torch.allclose(net.weight, twin.weight, atol=1e-6)
    assert not torch.equal(net.weight, before)


@every_optimizer
@pytest.mark.parametrize("foreach", [True, False])
def test_foreach_moves_the_others_to_the_same_place(name, foreach):
    def trained(choice):
        seeds.reseed()
        net = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
        optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.1), foreach=choice)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(4)).square().sum().backward()
            optimizer.step()
        return net

    ours, theirs = trained(foreach), trained(None)
    assert torch.allclose(ours.bias, theirs.bias)
    assert torch.equal(ours.weight, theirs.weight)


class Shapes(TorchDispatchMode):
    """Collects the shapes of results, and how many products are made."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.numel())
        self.products += "mm" in func.__name__
        return found


@every_optimizer
def test_tall_frames_never_need_an_n_by_n_matrix(name):
    w = frame((300, 4))
    optimizer = OPTIMIZERS[name](group(w), lr=0.1, **STATEFUL[name])
    with Shapes() as seen:
        run(optimizer, w, [gradient((300, 4), seed=i) for i in range(3)])
    assert seen.largest <= 300 * 4


@every_optimizer
def test_frames_of_one_shape_are_moved_as_one_batch(name):
    def moved(ws, first=0):
        optimizer = OPTIMIZERS[name](group(*ws), lr=0.1)
        for seed in range(3):
            for i, w in enumerate(ws):
                w.grad = gradient(tuple(w.shape), seed=first + 10 * i + seed)
            with Shapes() as seen:
                optimizer.step()
        return seen.products

    many = [frame((6, 4), seed=i) for i in range(20)]
    alone = [frame((6, 4), seed=i) for i in range(20)]
    products = moved(many)
    # The batch takes each stage that any of its frames needs.
    assert products <= max(moved([frame((6, 4), seed=i)], 10 * i) for i in range(20)) + 2
    for i, w in enumerate(alone):
        optimizer = OPTIMIZERS[name](group(w), lr=0.1)
        run(optimizer, w, [gradient((6, 4), seed=10 * i + seed) for seed in range(3)])
        assert torch.allclose(w, many[i], atol=1e-6)


@every_optimizer
def test_lowered_products_and_autocast_do_not_touch_the_step(name):
    def stepped(lowered):
        w = frame((32, 32))
        optimizer = OPTIMIZERS[name](group(w), lr=0.1)
        with lowered_products() if lowered else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                run(optimizer, w, [gradient((32, 32), seed=i) for i in range(3)])
        return w

    assert torch.equal(stepped(True), stepped(False))


@every_optimizer
def test_weights_of_16_bits_train_through_a_frame_of_32(name):
    seeds.reseed()
    net = sk.orthogonal(nn.Linear(8, 8, dtype=torch.bfloat16), "weight", "stiefel")
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.01, stiefel=dict(lr=0.1)))
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.ones(8, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    (coordinate,) = sk.coordinates(net, "weight").values()
    assert coordinate.dtype == torch.float32
    assert excess(coordinate) < 2.1
    assert net.weight.dtype == torch.bfloat16


def test_small_steps_add_up_in_the_remainder():
    w, g = frame((16, 16)), gradient((16, 16))
    optimizer = sk.optim.MultiplicativeCayley(group(w), lr=1e-9)

    def master():
        return w.detach().double() + optimizer.state[w]["lo"].double()

    run(optimizer, w, [g])
    start = master()
    run(optimizer, w, [g] * 300)
    expected = cayley(3e-7 * generator_of(start, g.double(), "canonical"), start) - start
    assert torch.dist(master() - start, expected) < 1e-4 * torch.linalg.matrix_norm(expected)


def test_a_frame_that_is_none_is_refused_and_one_that_is_nearly_one_is_mended():
    w = frame((6, 6))
    w.data += 1e-4
    with pytest.raises(errors.NotAFrameError, match="nearest_frame"):
        sk.optim.CayleySGD(group(w), lr=0.1)
    w = frame((6, 6))
    optimizer = sk.optim.CayleySGD(group(w), lr=0.1)
    w.data += 1e-4
    run(optimizer, w, [gradient((6, 6), seed=i) for i in range(3)])
    assert excess(w) < 2.1
    w.data *= 2
    optimizer.state[w]["wear"] = math.inf
    with pytest.raises(errors.NotAFrameError, match="changed from outside"):
        run(optimizer, w, [gradient((6, 6))])


@every_optimizer
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(lr=-1.0), errors.OptionError, "lr >= 0"),
        (dict(precision="exakt"), errors.OptionError, "precision"),
        (dict(weight_decay=0.1), errors.OptionError, "weight_decay=0 for frames"),
    ],
)
def test_settings_out_of_range_are_refused(name, options, error, text):
    with pytest.raises(error, match=text):
        OPTIMIZERS[name](group(frame((4, 4))), **options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (sk.optim.MultiplicativeCayley, dict(alpha=1.0)),
        (sk.optim.MultiplicativeCayley, dict(precondition="adam")),
        (sk.optim.MultiplicativeCayley, dict(side="top")),
        (sk.optim.MultiplicativeCayley, dict(momentum=-0.1)),
        (sk.optim.CayleySGD, dict(q=0.0)),
        (sk.optim.CayleySGD, dict(tolerance=0.0)),
        (sk.optim.CayleySGD, dict(momentum=-1.0)),
        (sk.optim.CayleyAdam, dict(betas=(0.9, 1.0))),
        (sk.optim.CayleyAdam, dict(eps=-1.0)),
        (sk.optim.POGO, dict(base="lion")),
    ],
)
def test_settings_of_single_optimizers_are_checked(make, options):
    with pytest.raises(errors.OptionError):
        make(group(frame((4, 4))), lr=0.1, **options)


def test_groups_are_checked_before_they_are_added():
    w = frame((4, 4))
    optimizer = sk.optim.CayleySGD(group(w), lr=0.1)
    net = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
    for wrong, error in [
        ({"params": [frame((4, 4)) * 2], "manifold": "stiefel:canonical"}, errors.NotAFrameError),
        ({"params": [nn.Parameter(torch.zeros(3, 4))], "manifold": "stiefel:canonical"}, errors.ShapeError),
        ({"params": [frame((4, 4))], "manifold": "stiefel:cannonical"}, errors.OptionError),
        ({"params": [nn.Parameter(torch.eye(4).bfloat16())], "manifold": "stiefel:canonical"}, errors.OptionError),
        ({"params": list(net.parameters())}, errors.OptimizerError),
    ]:
        wrong["params"] = [p.detach().requires_grad_() if not p.is_leaf else p for p in wrong["params"]]
        with pytest.raises(error):
            optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(group(frame((3, 3)))[0])
    with pytest.raises(errors.OptimizerError, match="parameter_groups"):
        sk.optim.MultiplicativeCayley(net.parameters())


def test_a_looser_tolerance_is_kept_costs_fewer_products_and_no_orthogonality():
    def stepped(tolerance):
        w, g = frame((40, 40), seed=2), gradient((40, 40))
        exact = frame((40, 40), torch.float64, seed=2).detach()
        expected = cayley(2e-3 * generator_of(exact, g.double(), "canonical"), exact) - exact
        optimizer = sk.optim.CayleySGD(group(w), lr=2e-3, q=math.inf, tolerance=tolerance)
        with Shapes() as seen:
            run(optimizer, w, [g])
        moved = w.detach().double() + optimizer.state[w]["lo"] - exact
        run(optimizer, w, [gradient((40, 40), seed=seed) for seed in range(40)])
        assert excess(w) < 2
        return (torch.dist(moved, expected) / torch.linalg.matrix_norm(expected)).item(), seen.products

    found = [stepped(tolerance) for tolerance in (1e-2, 1e-3, None)]
    for (error, _), tolerance in zip(found, (1e-2, 1e-3, 1e-5), strict=True):
        assert error <= tolerance
    assert found[0][1] < found[2][1]


def test_clipping_measures_what_moves_and_scales_everything():
    seeds.reseed()
    net = sk.orthogonal(nn.Linear(5, 5), "weight", "stiefel")
    (w,) = sk.coordinates(net, "weight").values()
    g = gradient((5, 5))
    w.grad, net.bias.grad = g + 100 * w.detach(), torch.ones(5)
    omega = w.detach().mT @ g - g.mT @ w.detach()
    expected = (0.5 * omega.square().sum() + 5).sqrt()
    for given in (net, net.parameters(), sk.optim.parameter_groups(net, lr=1.0)):
        assert torch.allclose(sk.optim.clip_grad_norm_(given, math.inf).float(), expected, rtol=1e-3)
    assert torch.equal(net.bias.grad, torch.ones(5))
    sk.optim.clip_grad_norm_(net, 0.5)
    assert torch.allclose(sk.optim.clip_grad_norm_(net, math.inf).float(), torch.tensor(0.5), rtol=1e-3)
    assert torch.allclose(net.bias.grad, 0.5 / expected * torch.ones(5), rtol=1e-3)
    groups = sk.optim.parameter_groups(net, lr=1.0, stiefel=dict(manifold="stiefel:euclidean"))
    assert sk.optim.clip_grad_norm_(groups, 9.0) < 0.5
    net.bias.grad.fill_(3e38)
    assert sk.optim.clip_grad_norm_(net, math.inf) > 3e38
    assert torch.equal(net.bias.grad, torch.full((5,), 3e38))
    net.bias.grad[0] = math.nan
    with pytest.raises(errors.NonFiniteError):
        sk.optim.clip_grad_norm_(net, 1.0, error_if_nonfinite=True)
    with pytest.raises(errors.OptionError):
        sk.optim.clip_grad_norm_(net, -1.0)


@every_optimizer
def test_a_rate_of_zero_makes_the_state_and_moves_nothing(name):
    w = frame((5, 5))
    before = w.detach().clone()
    optimizer = OPTIMIZERS[name](group(w), lr=0.0, **STATEFUL[name])
    run(optimizer, w, [torch.zeros(5, 5), gradient((5, 5))])
    assert torch.equal(w, before)
    assert {"lo", "wear"} <= set(optimizer.state[w])


@pytest.mark.parametrize("n", [40, 200, 512])
@pytest.mark.parametrize("ratio", [1.5, 2.5, 4.0, 10.0, 1e6])
@pytest.mark.parametrize("length", [0.03, 0.1, 0.3, 0.8])
def test_a_gradient_with_outliers_among_its_singular_values_costs_no_orthogonality(n, ratio, length):
    w = frame((n, n))
    optimizer = sk.optim.MultiplicativeCayley(group(w), lr=length)
    for seed in range(4):
        bulk = gradient((n, n), seed=seed) / 2.8  # B has singular values up to 1
        u, v = gradient((n, 2), seed=10 + seed).T
        run(optimizer, w, [(bulk / ratio + 0.7 * torch.outer(u, v)) @ w.detach()])
        assert excess(w) < 2
