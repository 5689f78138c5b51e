"""Convolutions as operators: their singular values, what shifts do to them, their adjoints, and their weights."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stiefelkit as sk
from benchmarks import launches
from stiefelkit import errors
from stiefelkit.functional._arithmetic.devices import without_reads

CONV, UP, CAYLEY = sk.nn.OrthogonalConv2d, sk.nn.OrthogonalConvTranspose2d, sk.nn.CayleyConv2d
GEOMETRY = [  # (in, out, kernel, stride, dilation, groups) of images of 6 x 6
    (4, 4, 3, 1, 1, 1),
    (4, 4, 2, 1, 1, 1),
    (2, 6, 3, 1, 1, 1),
    (6, 2, (5, 3), 1, 1, 1),
    (4, 8, 3, 2, 1, 1),
    (2, 12, 4, 2, 1, 1),
    (2, 9, 2, 2, 1, 1),
    (1, 3, 3, 2, 1, 1),
    (3, 3, 3, 2, 1, 3),
    (8, 8, 3, 1, 2, 2),
    (4, 4, 3, 3, 2, 2),
    (8, 2, 3, 2, 2, 1),
    (4, 4, 1, 2, 1, 1),
    (4, 4, (2, 3), (2, 1), 1, 1),
]
MAPS = [("cayley", {}), ("householder", {}), ("givens", {}), ("matrix_exp", {}), ("stiefel", {})]
STATED = {"kernel": CONV(4, 8, 3, stride=2), "adjoint": UP(8, 4, 3, stride=2), "frequencies": CAYLEY(4, 4, 3)}


def made(geometry, padding: Any = "same", transposed=False, **options) -> Any:
    inputs, outputs, kernel, stride, dilation, groups = geometry
    layer = UP if transposed else CONV
    return layer(inputs, outputs, kernel, stride, padding, dilation=dilation, groups=groups, **options)


def moved(layer, seed=0, scale=0.7):
    """The layer at other coordinates than those that it starts from."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return layer


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRY, ids=str)
def test_every_singular_value_of_a_circular_layer_is_1(geometry, transposed):
    stride = geometry[3]
    if transposed:
        if geometry[2] == 2 and stride == 1:
            pytest.skip("no symmetric padding")
        geometry = (geometry[1], geometry[0], *geometry[2:])
    layer = moved(made(geometry, transposed=transposed))
    size = (6, 6) if not transposed or stride == 1 else (4, 4)
    found = sk.metrics.lipschitz(layer, size)
    assert found.is_exact
    assert layer.is_orthogonal
    assert abs(found.largest - 1) <= 1e-6
    assert abs(found.smallest - 1) <= 1e-6


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("padding", ["same", "valid", "full", 1])
@pytest.mark.parametrize("geometry", GEOMETRY, ids=str)
def test_with_zeros_around_the_norm_is_at_most_1_and_the_layer_knows_where_it_is_orthogonal(
    geometry, padding, transposed
):
    kernel, stride, dilation = geometry[2:5]
    if transposed:
        geometry = (geometry[1], geometry[0], *geometry[2:])
        if padding == "same" and kernel == 2 and stride == 1:
            pytest.skip("no symmetric padding")
    if padding == "full":
        padding = tuple((taps - 1) * dilation for taps in ((kernel, kernel) if isinstance(kernel, int) else kernel))
    layer = made(geometry, padding, transposed, padding_mode="zeros")
    found = sk.metrics.lipschitz(layer, (7, 9), exact=True)
    assert found.largest <= 1 + 1e-6
    if layer.is_orthogonal:
        assert found.smallest >= 1 - 1e-6
    elif padding == "same" and stride == 1:
        assert found.smallest < 0.9


def test_a_transposed_layer_that_grows_beyond_its_last_step_is_not_called_orthogonal():
    layer = UP(4, 4, 3, 1, 4, output_padding=1, dilation=2, padding_mode="zeros")
    assert sk.metrics.lipschitz(layer, (8, 8), exact=True).smallest < 0.9
    assert not layer.is_orthogonal


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs", "kernel"),
    [(1, 4, 4, 3), (1, 4, 4, 2), (1, 4, 4, (4, 1)), (1, 3, 6, 3), (1, 6, 3, 5), (6, 6, 6, 3), (2, 4, 6, 1)],
)
@pytest.mark.parametrize("size", [(6, 8), (5, 7), (3, 2)])
def test_every_singular_value_of_a_cayley_convolution_is_1_for_images_of_any_size(
    groups, inputs, outputs, kernel, size
):
    layer = moved(CAYLEY(inputs, outputs, kernel, groups), scale=2.0)
    found = sk.metrics.lipschitz(layer, (inputs, *size))
    assert found.is_exact
    assert abs(found.largest - 1) <= 1e-6
    assert abs(found.smallest - 1) <= 1e-6


@pytest.mark.parametrize("layer", STATED.values(), ids=STATED)
def test_a_shifted_image_gives_the_shifted_output_and_no_image_none(layer):
    x = torch.randn(2, layer.in_channels, 6, 6)
    there, back = (2, 1) if layer is STATED["kernel"] else (1, 2) if layer is STATED["adjoint"] else (1, 1)
    for axis in (-1, -2):
        assert torch.allclose(layer(x.roll(there, axis)), layer(x).roll(back, axis), atol=1e-5)
    empty = layer(x[:0])
    assert empty.shape == (0, *layer(x).shape[1:])
    gradients = torch.autograd.grad(empty.sum(), [*layer.parameters()])
    assert all(torch.count_nonzero(g) == 0 for g in gradients)


@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("geometry", [g for g in GEOMETRY if g[2:4] != (2, 1)], ids=str)
def test_a_transposed_layer_is_the_adjoint_of_one_with_the_same_coordinates(geometry, mode):
    down = made(geometry, bias=False, padding_mode=mode)
    up = made((geometry[1], geometry[0], *geometry[2:]), transposed=True, bias=False, padding_mode=mode)
    up.load_state_dict(down.state_dict())
    x = torch.randn(1, geometry[0], 6, 6)
    y = down(x)
    z = torch.randn_like(y)
    assert torch.allclose((y * z).sum(), (x * up(z)).sum(), atol=1e-4)


@pytest.mark.parametrize(("name", "options"), MAPS)
@pytest.mark.parametrize("geometry", [(4, 4, 3, 1, 1, 1), (4, 8, 3, 2, 1, 2), (2, 6, 2, 1, 1, 1)], ids=str)
def test_maps_are_interchangeable(name, options, geometry):
    layer = made(geometry, parametrization=name, **options)
    assert sk.drift(layer)["weight"].error <= layer.parametrizations.weight.param.error_bound()
    found = sk.metrics.lipschitz(layer, (6, 6))
    assert max(abs(found.largest - 1), abs(found.smallest - 1)) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("geometry", [(2, 2, 3, 1, 1, 1), (1, 3, 3, 2, 1, 1), (3, 2, 2, 1, 1, 1)], ids=str)
def test_derivatives_of_a_kernel_are_right(dtype, geometry):
    layer = made(geometry, dtype=dtype)
    param = layer.parametrizations.weight.param
    coordinates = tuple(c.detach().requires_grad_() for c in layer.parametrizations.weight.coordinates.values())
    assert torch.autograd.gradcheck(param, coordinates)
    assert torch.autograd.gradgradcheck(param, coordinates)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("geometry", [*GEOMETRY, (4, 4, (4, 7), 1, 1, 1)], ids=str)
def test_the_few_operators_of_a_device_give_the_same_kernel_and_gradients(geometry, dtype):
    layer = made(geometry, dtype=dtype, bias=False, padding_mode="zeros")
    w, leaves = layer.weight, [*layer.parameters()]
    g = torch.randn_like(w)
    with without_reads():
        other = layer.weight
    assert torch.allclose(w, other, atol=1e-14)
    for one, two in zip(torch.autograd.grad(w, leaves, g), torch.autograd.grad(other, leaves, g), strict=True):
        assert torch.allclose(one, two, atol=1e-12)


def test_a_strided_convolution_is_at_most_seventy_operators_of_a_device_both_ways():
    layer, x, g = CONV(16, 32, 3, stride=2), torch.randn(2, 16, 8, 8), torch.ones(2, 32, 4, 4)
    assert launches.counts_of(lambda: torch.autograd.grad(layer(x), [*layer.parameters()], g))[0] <= 70


@pytest.mark.parametrize(("inputs", "outputs", "kernel"), [(2, 2, 3), (3, 2, 2), (1, 2, 1)])
def test_derivatives_of_a_cayley_convolution_are_right(inputs, outputs, kernel):
    layer = moved(CAYLEY(inputs, outputs, kernel, dtype=torch.float64))
    names = [name for name, p in layer.named_parameters() if p.numel()]

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    values = [layer.get_parameter(name).detach().requires_grad_() for name in names]
    x = torch.randn(1, inputs, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *values))
    assert torch.autograd.gradgradcheck(call, (x, *values))


@pytest.mark.parametrize(("kernel", "size"), [(k, s) for k in (3, 2, (4, 3)) for s in ((6, 8), (5, 7))])
def test_a_cayley_convolution_is_one_by_its_kernel_and_comes_from_a_skew_kernel_of_its_taps(kernel, size):
    layer = moved(CAYLEY(3, 3, kernel, dtype=torch.float64), scale=0.3)
    k, x = layer.kernel(*size), torch.randn(2, 3, *size, dtype=torch.float64)
    ends = [size[1] - 1, 0, size[0] - 1, 0]
    y = F.conv2d(F.pad(x, ends, "circular"), k.flip(2, 3), layer.bias)
    assert torch.allclose(layer(x), y, atol=1e-12)
    q = torch.fft.fft2(k).movedim((2, 3), (0, 1)) * layer.signs
    eye = torch.eye(3, dtype=q.dtype)
    a = torch.fft.ifft2((eye - q) @ torch.linalg.inv(eye + q), dim=(0, 1)).real
    inside = torch.zeros(size, dtype=torch.bool)
    for t in itertools.product(*(range(-((n - 1) // 2), n // 2 + 1) for n in layer.kernel_size)):
        inside[t] = inside[tuple(-n for n in t)] = True
    assert a[~inside].abs().max() <= 1e-10
    assert a[inside].abs().max() >= 1e-2


@pytest.mark.parametrize("size", [(6, 8), (5, 6), (1, 4)])
def test_frames_of_self_conjugate_frequencies_are_real(size):
    layer = moved(CAYLEY(4, 3, 3), scale=3.0)
    w = layer.frames(*size)[0].unflatten(0, (size[0], size[1] // 2 + 1))
    for i, j in itertools.product({0, size[0] // 2} if size[0] % 2 == 0 else {0}, {0, size[1] // 2}):
        assert w[i, j].imag.abs().max() == 0
    assert sk.metrics.orthogonality_error(w).max() <= sk.metrics.permitted_error(3, torch.float32)


@pytest.mark.parametrize(
    "layer", [CONV(4, 4, 3, init="identity"), CAYLEY(4, 4, 3, init="identity")], ids=["kernel", "frequencies"]
)
def test_the_identity_leaves_an_image_as_it_is(layer):
    nn.init.zeros_(layer.bias)
    x = torch.randn(2, 4, 5, 6)
    assert torch.allclose(layer(x), x, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [sk.nn.OrthogonalConv1d(4, 6, 3), sk.nn.OrthogonalConvTranspose1d(6, 4, 3, 2), sk.nn.CayleyConv1d(4, 4, 4)],
    ids=lambda layer: layer._get_name(),
)
def test_sequences_are_images_of_one_axis(layer):
    found = sk.metrics.lipschitz(layer, (layer.in_channels, 8))
    assert max(abs(found.largest - 1), abs(found.smallest - 1)) <= 1e-6
    x = torch.randn(3, layer.in_channels, 8)
    assert torch.allclose(layer(x[0]), layer(x)[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["kernel", "adjoint"])
def test_a_baked_layer_is_torchs_convolution(kind):
    layer = STATED[kind]
    baked = sk.bake(copy.deepcopy(layer))
    assert isinstance(baked, nn.Conv2d if kind == "kernel" else nn.ConvTranspose2d)
    assert isinstance(baked.weight, nn.Parameter)
    x = torch.randn(2, layer.in_channels, 6, 6)
    assert torch.equal(baked(x), layer(x))
    if kind == "kernel":
        plain = nn.Conv2d(4, 8, 3, 2, 1, padding_mode="circular")
        plain.load_state_dict(baked.state_dict())
        assert torch.equal(plain(x), layer(x))


@pytest.mark.parametrize("size", [(6, 5), (1, 4), (7, 8)])
@pytest.mark.parametrize("sides", [(4, 4, 1, True), (6, 2, 1, False), (2, 6, 2, True)], ids=["square", "wide", "tall"])
def test_a_kernel_that_is_baked_for_a_size_does_what_the_layer_does_to_it(size, sides):
    inputs, outputs, groups, bias = sides
    for layer, image in (
        (CAYLEY(inputs, outputs, 3, groups, bias), size),
        (sk.nn.CayleyConv1d(inputs, outputs, 4, groups, bias, dtype=torch.float64), size[1:]),
    ):
        baked, x = moved(layer).baked(*image), torch.randn(2, inputs, *image, dtype=layer.skew.dtype)
        assert type(baked) is (nn.Conv1d if layer.dims == 1 else nn.Conv2d)
        assert torch.allclose(baked(x), layer(x), atol=1e-5 if x.dtype == torch.float32 else 1e-13)
        assert all(p.requires_grad and not p.grad_fn for p in baked.parameters())


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_lowered_products_do_not_touch_the_geometry(precision):
    layer = CONV(4, 4, 3)
    w = layer.weight.detach().clone()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer.weight, w)
            assert STATED["frequencies"](torch.randn(1, 4, 6, 6)).dtype == torch.float32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("geometry", [*GEOMETRY, (8, 8, 5, 1, 1, 1)], ids=str)
def test_a_kernel_of_one_layer_is_assigned_to_another(geometry, dtype):
    others = [moved(made(geometry, dtype=dtype)), made(geometry, dtype=dtype, init="identity")]
    others.append(made(geometry, dtype=dtype, parametrization="stiefel"))
    for other in others:
        layer, w = moved(made(geometry, dtype=dtype), 1), other.weight.detach()
        if geometry[:4] == (2, 12, 4, 2):  # more outputs than inputs in a patch
            with pytest.raises(errors.ImageError, match="stride of 1"):
                layer.weight = w
            continue
        layer.weight = w
        assert torch.linalg.vector_norm(layer.weight - w) <= 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", [CONV, UP])
def test_a_kernel_that_the_map_does_not_give_is_refused_and_its_own_changes_nothing(kind):
    layer = moved(kind(4, 4, 3))
    state, w = copy.deepcopy(layer.state_dict()), layer.weight.detach().clone()
    layer.weight = w
    moved_image = torch.zeros_like(w)
    moved_image[:, :, 0, 0] = torch.eye(4)
    for kernel, error, word in ((moved_image, errors.ImageError, "projectors"), (2 * w, errors.NotAFrameError, "W")):
        with pytest.raises(error, match=word):
            layer.weight = kernel
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())
    layer.weight = w.flip(0)
    assert torch.allclose(layer.weight, w.flip(0), atol=1e-6)


REFUSED = [
    (lambda: CONV(4, 4, 3, padding_mode="reflect"), "padding_mode"),
    (lambda: CONV(4, 4, 3, padding=0), "circular"),
    (lambda: CONV(4, 4, (3, 3, 3)), "kernel_size"),
    (lambda: CONV(4, 4, 3, groups=3), "in_channels"),
    (lambda: CONV(4, 9, 3, stride=2, dilation=2), "common factor"),
    (lambda: CONV(4, 4, 3, groups=4), "two channels a group"),
    (lambda: CONV(4, 4, (2, 3), stride=(1, 2)), "odd kernel"),
    (lambda: CONV(4, 4, 3, parametrization="margin"), "frames"),
    (lambda: CONV(4, 4, 3, init="orthogonal"), "no init"),
    (lambda: UP(4, 4, 3, stride=2, output_padding=0), "output_padding"),
    (lambda: STATED["kernel"](torch.zeros(1, 4, 5, 6)), "stride"),
    (lambda: STATED["adjoint"](torch.zeros(1, 8, 3, 3), [6, 6]), "output_size"),
    (lambda: CAYLEY(4, 4, 3, dtype=torch.bfloat16), "float32"),
    (lambda: STATED["frequencies"].kernel(5), "size"),
    (lambda: STATED["frequencies"](torch.zeros(1, 4, 0, 6)), "images"),
    (lambda: CONV(4, 4, 7)(torch.zeros(1, 4, 2, 8)), "at least"),
    (lambda: CONV(4, 4, 3).load_state_dict(CONV(4, 4, 3, parametrization="householder").state_dict()), "checkpoint"),
]


@pytest.mark.parametrize(("call", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_cannot_be_right_is_refused(call, word):
    with pytest.raises(errors.StiefelkitError, match=word):
        call()
