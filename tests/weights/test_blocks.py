"""Several weights side by side in one, as q, k and v are: a frame of each."""

import copy
import itertools
from typing import Any

import pytest
import torch
from optimizers_at_hand import descend
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.composite import SideBySide
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.parametrizations import Cayley, Householder, Scaled, View, Viewed
from stiefelkit.testing import check_parametrization, seeds
from stiefelkit.testing.cases import saved_and_loaded

GQA = (8, 2, 2)
"""Rows of queries, keys and values where heads share keys and values."""
KINDS: dict[str, tuple[tuple[int, int], Any, int]] = {
    "equal, tall": ((18, 4), 3, 0),
    "equal, wide": ((12, 6), 3, 0),
    "equal, square": ((12, 4), 3, 0),
    "heads": ((12, 4), 6, 0),
    "inputs by outputs": ((4, 12), 3, 1),
    "outputs of heads": ((6, 8), 4, 1),
    "sizes": ((12, 5), GQA, 0),
    "sizes, turned": ((5, 12), GQA, 1),
    "tall and wide": ((9, 4), (6, 1, 2), 0),
    "one after another": ((9, 4), [2, 5, 2], 0),
}


def made(kind: str, name: Any = "cayley", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    (rows, columns), blocks, dim = KINDS[kind]
    layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
    return sk.orthogonal(layer, "weight", name, blocks=blocks, dim=dim, **options)


def parts(w: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """The blocks of a weight, as tall matrices."""
    shape, blocks, dim = KINDS[kind]
    sizes = [shape[dim] // blocks] * blocks if isinstance(blocks, int) else list(blocks)
    return [q if q.shape[0] >= q.shape[1] else q.mH for q in w.detach().split(sizes, dim)]


def require_frames(w: torch.Tensor, kind: str, scale: float = 1.0) -> None:
    for q in parts(w, kind):
        assert orthogonality_error(q / scale).item() <= permitted_error(q.shape[1], w.dtype) * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("cayley", "householder", "matrix_exp", "stiefel")),
        *((name, torch.complex64) for name in ("cayley", "givens", "rebased")),
    ],
)
def test_each_block_is_the_frame_nearest_to_what_it_was(kind, name, dtype):
    seeds.reseed()
    (rows, columns), blocks, dim = KINDS[kind]
    layer: Any = nn.Linear(columns, rows, bias=False, dtype=dtype)
    old = layer.weight.detach().clone()
    sk.orthogonal(layer, "weight", name, blocks=blocks, dim=dim)
    require_frames(layer.weight, kind)
    assert sk.drift(layer)["weight"].bits_lost < 2
    for q, w in zip(parts(layer.weight, kind), parts(old, kind), strict=True):
        nearest = sk.functional.nearest_frame(w)
        if name == "matrix_exp" and not dtype.is_complex and w.shape[0] == w.shape[1]:
            if torch.linalg.det(nearest) < 0:
                continue  # the nearest rotation is taken
        assert torch.allclose(q, nearest.to(dtype), atol=1e-5)
    kept = layer.weight.detach().clone()
    layer.weight = kept
    assert torch.allclose(layer.weight, kept, atol=1e-5)
    layer(torch.ones(2, columns, dtype=dtype)).abs().sum().backward()
    grads: list[Any] = [c.grad for c in sk.coordinates(layer, "weight").values()]
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_of_frames_moves_each_along_its_manifold(kind):
    layer = made(kind, "stiefel")
    names = {name: "stiefel:canonical" for name in sk.coordinates(layer, "weight")}
    assert layer.parametrizations.weight.param.manifolds == names
    optimizer = sk.optim.CayleyAdam(sk.optim.parameter_groups(layer, lr=0.1))
    target = torch.randn_like(layer.weight)
    losses = descend(optimizer, lambda: (layer.weight - target).square().sum(), 10)
    assert losses[-1] < losses[0]
    require_frames(layer.weight, kind)
    assert sk.drift(layer)["weight"].bits_lost < 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["cayley", "stiefel"])
def test_a_state_dict_goes_round_and_names_its_blocks(kind, name):
    layer, twin = made(kind, name), made(kind, name, init="haar")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight)
    (rows, columns), _, _ = KINDS[kind]
    plain = sk.orthogonal(nn.Linear(columns, rows, bias=False), "weight", name)
    others = [made(other, name) for other in KINDS if KINDS[other][0] == (rows, columns) and other != kind]
    for a, b in itertools.permutations([layer, plain, *others], 2):
        with pytest.raises(errors.CheckpointError, match="weight"):
            a.load_state_dict(b.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_copied_pickled_reset_assigned_cast_and_baked(kind):
    layer = made(kind)
    w = layer.weight.detach().clone()
    twin, again = copy.deepcopy(layer), saved_and_loaded(layer, weights_only=False)
    sk.reset_(layer, "weight")
    assert not torch.allclose(layer.weight, w, atol=1e-2)
    require_frames(layer.weight, kind)
    assert torch.equal(twin.weight, w)
    assert torch.equal(again.weight, w)
    sk.assign_(layer, "weight", w)
    assert torch.allclose(layer.weight, w, atol=1e-6)
    for wrong in (torch.ones_like(w), 2 * w):
        with pytest.raises(errors.NotAFrameError):
            sk.assign_(layer, "weight", wrong)
    with pytest.raises(errors.ShapeError):
        sk.assign_(layer, "weight", torch.ones(3, 3))
    assert torch.allclose(layer.weight, w, atol=1e-6)
    double = copy.deepcopy(layer).double()
    require_frames(double.weight, kind)
    half = copy.deepcopy(layer).bfloat16()
    assert half.weight.dtype == torch.bfloat16
    assert torch.allclose(half.weight.float(), w, atol=1e-2)
    plain = sk.bake(layer)
    assert type(plain) is nn.Linear
    assert torch.allclose(plain.weight, w, atol=1e-6)
    sk.orthogonal(plain, "weight", "householder", blocks=KINDS[kind][1], dim=KINDS[kind][2])
    assert torch.allclose(plain.weight, w, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["haar", "identity", "project"])
def test_a_scheme_draws_each_and_a_tensor_is_assigned(kind, init):
    layer = made(kind, init=init)
    require_frames(layer.weight, kind)
    if init == "identity":
        for q in parts(layer.weight, kind):
            assert torch.allclose(q, torch.eye(*q.shape), atol=1e-6)
    given = made(kind, "householder", init=layer.weight.detach())
    assert torch.allclose(given.weight, layer.weight, atol=1e-5)
    drawn = [made(kind, init="haar", generator=seeds.generator(5)).weight for _ in range(2)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["cayley", "stiefel"])
def test_a_gain_is_each_blocks_own(kind, name):
    seeds.reseed()
    require_frames(made(kind, name, gain=1.5).weight, kind, 1.5)
    (rows, columns), blocks, dim = KINDS[kind]
    plain: Any = nn.Linear(columns, rows, bias=False)
    old = plain.weight.detach().clone()
    layer: Any = sk.orthogonal(plain, "weight", name, blocks=blocks, dim=dim, gain="learned")
    scales = [torch.linalg.svdvals(w).mean().item() for w in parts(old, kind)]
    for q, scale in zip(parts(layer.weight, kind), scales, strict=True):
        assert torch.allclose(torch.linalg.svdvals(q), torch.full((q.shape[1],), scale), atol=1e-5)
    assert sk.drift(layer)["weight"].bits_lost < 2
    gains = torch.cat([c for key, c in sk.coordinates(layer, "weight").items() if key.endswith("gain")])
    assert gains.tolist() == pytest.approx(scales, rel=1e-5)
    w = layer.weight.detach().clone()
    sk.reset_(layer, "weight")
    require_frames(layer.weight, kind)
    layer.weight = w
    assert torch.allclose(layer.weight, w, atol=1e-5)
    with pytest.raises(errors.NotAFrameError, match="gain"):
        layer.weight = 0 * w
    twin: Any = made(kind, name, gain="learned")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight)
    if name == "cayley":
        optimizer = torch.optim.SGD(sk.optim.parameter_groups(layer, lr=0.0, gain=0.1))
        layer.weight.square().sum().backward()
        optimizer.step()
        for q, old_q in zip(parts(layer.weight, kind), parts(w, kind), strict=True):
            assert q.norm() < old_q.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_one_kind_are_mapped_together(kind):
    net: Any = nn.ModuleList([made(kind, gain="learned") for _ in range(3)])
    alone = [layer.weight.detach().clone() for layer in net]
    with sk.grouped(net):
        together = [layer.weight for layer in net]
        assert together[0]._base is not None
        for a, b in zip(alone, together, strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        torch.stack([w.square().sum() for w in together]).sum().backward()
    assert all(c.grad is not None for layer in net for c in sk.coordinates(layer, "weight").values())


@pytest.mark.parametrize("kind", ["equal, wide", "sizes", "tall and wide"])
def test_rebasing_keeps_the_weight(kind):
    for gain in (1.0, "learned"):
        layer = made(kind, "rebased", gain=gain)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        layer.weight[0, 0].backward()
        optimizer.step()
        w = layer.weight.detach().clone()
        sk.rebase_(layer, "weight", optimizer)
        assert torch.allclose(layer.weight, w, atol=1e-5)
        for key, c in sk.coordinates(layer, "weight").items():
            assert key.endswith("gain") or not c.any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal, wide", "inputs by outputs", "sizes"])
@pytest.mark.parametrize("gain", [1.0, "learned"])
def test_they_compile_without_a_break_and_are_exported(kind, gain):
    layer = made(kind, gain=gain)
    x = torch.randn(2, layer.in_features)
    expected = layer(x)
    torch.compiler.reset()
    assert torch.allclose(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected, atol=1e-6)
    exported = torch.export.export(layer, (x,)).module()
    assert torch.allclose(exported(x), expected, atol=1e-6)
    stacked = torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
    assert torch.allclose(stacked, expected, atol=1e-6)


@pytest.mark.parametrize("sizes", [3, (8, 2, 2)])
def test_fused_convolutions_and_batches_are_read_so_too(sizes):
    conv: Any = nn.Conv2d(10, 12, 1)
    sk.orthogonal(conv, "weight", view="out_by_rest", blocks=sizes)
    batch: Any = nn.ParameterDict({"experts": torch.randn(5, 12, 10)})
    sk.orthogonal(batch, "experts", blocks=sizes)
    rows = [4, 4, 4] if sizes == 3 else list(sizes)
    for w in conv.weight.detach().flatten(1).split(rows):
        assert orthogonality_error(w.mT) < 1e-6
    for w in batch["experts"].detach().split(rows, 1):
        assert orthogonality_error(w.mT).max() < 1e-6
    taps: Any = nn.ConvTranspose1d(4, 12, 3)
    sk.orthogonal(taps, "weight", view="per_tap", blocks=3, dim=1)
    for w in taps.weight.detach().split(4, 1):
        assert orthogonality_error(w.permute(2, 0, 1)).max() < 1e-6


@pytest.mark.parametrize(("rows", "columns", "blocks", "dim"), [(12, 5, 3, 0), (5, 12, 4, 1), (12, 4, 6, 0)])
def test_a_view_of_blocks_takes_a_weight_apart_and_back(rows, columns, blocks, dim):
    view = View("matrix", (rows, columns), blocks=blocks, dim=dim)
    w = torch.randn(rows, columns, dtype=torch.complex64)
    assert view.to_frame(w).shape == view.frame_shape
    assert torch.equal(view.from_frame(view.to_frame(w)), w)
    stack = torch.stack([view.to_frame(w), view.to_frame(2 * w)])
    assert torch.equal(view.from_frame(stack), torch.stack([w, 2 * w]))
    pieces = view.to_frame(w)
    assert torch.equal(pieces.mH if view.is_wide else pieces, torch.stack(w.chunk(blocks, dim)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"blocks": 5}, errors.ShapeError),
        ({"blocks": (4, 4)}, errors.ShapeError),
        ({"blocks": 0}, errors.OptionError),
        ({"blocks": 3, "dim": 2}, errors.OptionError),
        ({"dim": 1}, errors.OptionError),
        ({"blocks": (8, 4), "view": "group_out_by_rest"}, errors.OptionError),
    ],
)
def test_what_are_no_blocks_is_refused(options, error):
    layer = nn.Linear(4, 12)
    with pytest.raises(error):
        sk.orthogonal(layer, "weight", **options)
    assert not hasattr(layer, "parametrizations")


def test_a_map_with_an_option_of_that_name_keeps_it():
    layer: Any = sk.orthogonal(nn.Linear(6, 6), "weight", "block_diagonal", blocks=3, init="haar")
    assert layer.parametrizations.weight.param.blocks == 3
    both: Any = nn.Linear(4, 12)
    options: dict[str, Any] = {"inner": "block_diagonal", "inner_options": {"blocks": 2}}
    sk.orthogonal(both, "weight", "rebased", blocks=3, **options)
    assert len(both.weight.detach().split(4)) == 3
    assert all(orthogonality_error(w) < 1e-6 for w in both.weight.detach().split(4))
    with pytest.raises(errors.OptionError, match="needs blocks= of its own"):
        sk.orthogonal(nn.Linear(6, 6), "weight", "block_diagonal", blocks=3, dim=1)


class Split(SideBySide):
    """A wide and a tall part, in rows, with a learned gain in one."""

    def __init__(self, shape, *, dtype=None, device=None, precision="exact"):
        made: dict[str, Any] = {"dtype": dtype, "device": device, "precision": precision}
        wide, tall = View("matrix", (4, 3), blocks=2), (shape[0] - 4, 3)
        first = Viewed(Scaled(Cayley((2, 3, 2), **made), "learned", 2), wide)
        super().__init__([first, Householder(tall, **made)], (2, 2, tall[0]), 0, -2)

    @classmethod
    def examples(cls):
        return [((9, 3), {})]


# Those that do not ask for a frame.
LAWS = ["gradients", "pure", "threads", "finite_gradients", "precision", "schemes", "linear", "checkpoint"]
LAWS += ["functional_call", "forward_mode", "batched_gradients", "second_derivatives"]


@pytest.mark.parametrize("law", LAWS)
def test_laws_that_do_not_ask_for_a_frame_hold_of_parts_in_a_row(law):
    check_parametrization(Split, [law])


@pytest.mark.parametrize("name", sk.available())
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32], ids=str)
def test_a_weight_of_one_row_is_no_lazy_conjugate(name, dtype):
    """Nor is a gradient, which neither torch's nor our clipping could scale."""
    if sk.available()[name].supports((5, 1), dtype) is not None:
        pytest.skip("not of this kind")
    layer: Any = sk.orthogonal(nn.Linear(5, 1, bias=False, dtype=dtype), "weight", name)
    x = torch.randn(2, 5, dtype=dtype)
    assert not layer.weight.is_conj()
    layer.weight.detach().numpy()
    layer(x).abs().sum().backward()
    assert not any(p.grad.is_conj() for p in layer.parameters())
    for clip in (nn.utils.clip_grad_norm_, sk.optim.clip_grad_norm_):
        clip(layer.parameters(), 1e-3)


@pytest.mark.parametrize(
    ("name", "options"), [("stiefel", {}), ("margin", {"v": "stiefel"}), ("rebased", {"inner": "stiefel"})]
)
def test_the_gradient_of_a_frame_that_is_read_as_its_adjoint_is_no_lazy_conjugate(name, options):
    layer: Any = sk.orthogonal(nn.Linear(4, 4, bias=False, dtype=torch.complex64), "weight", name, **options)
    (torch.randn(3, 4, dtype=torch.complex64) @ layer.weight.mH).abs().sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    assert not any(p.grad.is_conj() for p in layer.parameters())
