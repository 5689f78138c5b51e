"""Roads that every layer goes: each gives what the layer gives by itself, or refuses in a sentence.

A layer of `sk.nn` needs a line in `LAYERS`; what cannot work needs one in `SENTENCES`, with a word of its error.
"""

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds
from stiefelkit.weights.find import orthogonal_weights
from stiefelkit.weights.modules import CoordinateParameters


class Layer(NamedTuple):
    """How a layer is made, which shape its input has (B and T are sizes), and what it is."""

    make: Callable[..., nn.Module]
    shape: tuple[str | int, ...]
    is_recurrent: bool = False

    def net(self, **options: Any) -> Any:
        seeds.reseed()
        return self.make(**options)

    def x(self, batch: int = 3, steps: int = 9, dtype: torch.dtype = torch.float32) -> Tensor:
        sizes = {"B": batch, "T": steps}
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        return torch.randn(shape, dtype=dtype, generator=seeds.generator(1))


def adapter(kind: str, options: Any, **of_adapter: Any) -> nn.Module:
    return sk.nn.adapt(nn.Linear(4, 6, **options), "weight", kind, **of_adapter)


OF_TIME, OF_BATCH = ("T", "B", 3), ("B", "T", 3)
LAYERS: dict[str, Layer] = {
    "OrthogonalRNN": Layer(lambda **o: sk.nn.OrthogonalRNN(3, 8, bidirectional=True, **o), OF_TIME, True),
    "LinearTransitionRNN": Layer(lambda **o: sk.nn.LinearTransitionRNN(3, 8, trainable_h0=True, **o), OF_TIME, True),
    "OrthogonalRNNCell": Layer(lambda **o: sk.nn.OrthogonalRNNCell(3, 8, **o), ("B", 3)),
    "GORU": Layer(lambda **o: sk.nn.GORU(3, 8, **o), OF_TIME, True),
    "RotationRNN": Layer(lambda **o: sk.nn.RotationRNN(3, 8, heads=2, trainable_h0=True, **o), OF_TIME, True),
    "RotationRNN complex": Layer(lambda **o: sk.nn.RotationRNN(3, 8, field="complex", **o), OF_TIME, True),
    "LRU": Layer(lambda **o: sk.nn.LRU(3, 8, 2, bidirectional=True, trainable_h0=True, **o), OF_TIME, True),
    "RotationBlock": Layer(lambda **o: sk.nn.RotationBlock(3, 8, **o), OF_BATCH),
    "LRUBlock": Layer(lambda **o: sk.nn.LRUBlock(3, 8, **o), OF_BATCH),
    "ReflectorRNN": Layer(lambda **o: sk.nn.ReflectorRNN(3, 8, heads=2, decay=(0.9, 0.999), **o), OF_TIME, True),
    "ReflectorRNN gated": Layer(
        lambda **o: sk.nn.ReflectorRNN(3, 8, bidirectional=True, tau="gated", conv=3, columns=2, **o), OF_TIME, True
    ),
    "ReflectorRNN free": Layer(
        lambda **o: sk.nn.ReflectorRNN(3, 16, 2, tau="free", additive=False, trainable_h0=True, **o), OF_TIME, True
    ),
    "ReflectorBlock": Layer(lambda **o: sk.nn.ReflectorBlock(3, 8, heads=2, **o), OF_BATCH),
    "OrthogonalLinear": Layer(lambda **o: sk.nn.OrthogonalLinear(3, 4, **o), ("B", 3)),
    "OrthogonalLinear by reflections": Layer(
        lambda **o: sk.nn.OrthogonalLinear(64, 64, parametrization="householder", reflections=2, **o), ("B", 64)
    ),
    "HadamardLinear": Layer(lambda **o: sk.nn.HadamardLinear(4, 6, **o), ("B", 4)),
    "ModReLU": Layer(lambda **o: sk.nn.ModReLU(4, **o), ("B", 4)),
    "OrthogonalConv1d": Layer(lambda **o: sk.nn.OrthogonalConv1d(4, 6, 3, **o), ("B", 4, 8)),
    "OrthogonalConv2d": Layer(lambda **o: sk.nn.OrthogonalConv2d(4, 8, 3, **o), ("B", 4, 6, 6)),
    "OrthogonalConvTranspose1d": Layer(lambda **o: sk.nn.OrthogonalConvTranspose1d(6, 4, 3, **o), ("B", 6, 8)),
    "OrthogonalConvTranspose2d": Layer(lambda **o: sk.nn.OrthogonalConvTranspose2d(8, 4, 3, **o), ("B", 8, 4, 4)),
    "OrthogonalConv2d of stride 2": Layer(lambda **o: sk.nn.OrthogonalConv2d(4, 8, 3, stride=2, **o), ("B", 4, 6, 6)),
    "OrthogonalConvTranspose2d of stride 2": Layer(
        lambda **o: sk.nn.OrthogonalConvTranspose2d(8, 4, 3, stride=2, **o), ("B", 8, 4, 4)
    ),
    "CayleyConv1d": Layer(lambda **o: sk.nn.CayleyConv1d(4, 4, 3, **o), ("B", 4, 7)),
    "CayleyConv2d": Layer(lambda **o: sk.nn.CayleyConv2d(4, 2, 3, **o), ("B", 4, 6, 6)),
    "OrthogonalAdapter": Layer(lambda **o: adapter("block_diagonal", o, block_size=2), ("B", 4)),
    "OrthogonalAdapter of outputs": Layer(lambda **o: adapter("householder", o, reflections=2, side="out"), ("B", 4)),
    "ButterflyAdapter": Layer(lambda **o: adapter("butterfly", o, block_size=2, factors=2), ("B", 4)),
    "PrincipalAdapter": Layer(lambda **o: adapter("principal", o, rank=2), ("B", 4)),
    "LowRankAdapter": Layer(lambda **o: adapter("low_rank", o, rank=2), ("B", 4)),
}
"""By the name of the class; what stands behind it is a variant."""

SENTENCES: dict[tuple[str, str], str] = {
    ("OrthogonalRNN", "double_backward"): "reference",
    ("LinearTransitionRNN", "double_backward"): "reference",
    ("GORU", "trace_of_other_steps"): "Expected 9 elements",
    ("GORU", "export_of_any_steps"): "specialized",
    ("RotationRNN complex", "onnx"): "ONNX",
    ("HadamardLinear", "onnx"): "hadamard_transform",
    ("CayleyConv1d", "onnx"): "baked",
    ("CayleyConv2d", "onnx"): "baked",
}


def tensors(found: Any) -> list[Tensor]:
    """All tensors in what a layer returns."""
    if isinstance(found, PackedSequence):
        found = pad_packed_sequence(found)[0]
    if isinstance(found, tuple | list):
        return [t for part in found for t in tensors(part)]
    return [] if found is None else [found]


def require_same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        if b.numel():
            scale = max(1.0, b.detach().abs().max().item())
            assert (a.detach().to(b.dtype) - b.detach()).abs().max().item() <= tolerance * scale


def gradients(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """Gradients of a loss by the input and all parameters."""
    x = x.clone().requires_grad_()
    loss = torch.stack([t.abs().square().mean() for t in tensors(call(x))]).sum()
    leaves = [x, *(p for p in net.parameters() if p.requires_grad)]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, leaves, strict=True)]


def road_compile(layer: Layer) -> None:
    torch.compiler.reset()
    net, x = layer.net(), layer.x()
    compiled: Any = torch.compile(net, fullgraph=True, backend="aot_eager")
    require_same(compiled(x), net(x))
    require_same(gradients(net, compiled, x), gradients(net, net, x))


def road_compile_dynamic(layer: Layer) -> None:
    torch.compiler.reset()
    net = layer.net()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    for x in (layer.x(), layer.x(5, 12)):
        require_same(compiled(x), net(x))


def road_export(layer: Layer) -> None:
    net, x = layer.net().eval(), layer.x()
    exported: Any = torch.export.export(net, (x,), strict=True).module()
    require_same(exported(x), net(x))


def road_export_of_any_batch(layer: Layer) -> None:
    net, batch = layer.net().eval(), {layer.shape.index("B"): torch.export.Dim("batch", min=2, max=64)}
    exported: Any = torch.export.export(net, (layer.x(),), dynamic_shapes=(batch,), strict=False).module()
    require_same(exported(layer.x(7)), net(layer.x(7)))


def road_trace(layer: Layer) -> None:
    net = layer.net().eval()
    for batch in (1, 0) if "Conv" in type(net).__name__ else (1,):
        traced: Any = torch.jit.trace(net, (layer.x(batch),), check_trace=False)
        for x in (layer.x(4), layer.x(batch)):
            require_same(traced(x), net(x))


def road_trace_of_other_steps(layer: Layer) -> None:
    if layer.is_recurrent:
        net = layer.net().eval()
        traced: Any = torch.jit.trace(net, (layer.x(),), check_trace=False)
        require_same(traced(layer.x(3, 12)), net(layer.x(3, 12)))


def road_export_of_any_steps(layer: Layer) -> None:
    if layer.is_recurrent:
        net, steps = layer.net().eval(), {layer.shape.index("T"): torch.export.Dim("steps", min=2)}
        exported: Any = torch.export.export(net, (layer.x(),), dynamic_shapes=(steps,), strict=False).module()
        require_same(exported(layer.x(3, 12)), net(layer.x(3, 12)))


def road_onnx(layer: Layer) -> None:
    import onnxruntime

    net, x = sk.bake(layer.net().eval()), layer.x()
    shapes = ({layer.shape.index("B"): torch.export.Dim.DYNAMIC},)
    program: Any = torch.onnx.export(net, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    y = layer.x(5)
    found = session.run(None, {session.get_inputs()[0].name: y.numpy()})
    require_same([torch.from_numpy(t) for t in found], net(y))


def road_last_only(layer: Layer) -> None:
    if layer.is_recurrent:
        net, x = layer.net(), layer.x()
        require_same(net(x, last_only=True)[1], net(x)[1])
        torch.compiler.reset()
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        require_same(compiled(x, last_only=True)[1], net(x)[1])


def road_packed(layer: Layer) -> None:
    if layer.is_recurrent:
        net = layer.net()
        each = [layer.x(1, steps)[:, 0] for steps in (4, 9, 1)]
        out, last = net(pack_sequence(each, enforce_sorted=False))
        rows, lengths = pad_packed_sequence(out)
        for i, x in enumerate(each):
            alone, end = net(x[:, None])
            require_same([rows[: int(lengths[i]), i], last[:, i]], [alone[:, 0], end[:, 0]])


def road_one_step_and_one_sequence(layer: Layer) -> None:
    net = layer.net()
    assert all(torch.isfinite(g).all() for g in gradients(net, net, layer.x(1, 1)))
    batch = layer.x(5)  # no other size of a result is 5
    one = [t.narrow(t.shape.index(5), 0, 1) for t in tensors(net(batch))]
    require_same(net(batch.narrow(layer.shape.index("B"), 0, 1)), one)


def road_autocast(layer: Layer) -> None:
    net, x = layer.net(), layer.x()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = net(x)
    require_same(found, net(x), 0.05)


def road_casts(layer: Layer) -> None:
    net, x = layer.net(), layer.x()
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.half, 0.01)):
        cast = copy.deepcopy(net).to(dtype)
        require_same(cast(x.to(dtype)), net(x), tolerance)
        require_same(cast.float()(x), net(x), tolerance)
        with contextlib.suppress(errors.DtypeError):  # complex states have no 16 bits
            made = layer.net(dtype=dtype)  # an adapter of a layer of 16 bits has float32, until it is cast
            assert isinstance(net, sk.nn.Adapter) or dtypes(made) == dtypes(copy.deepcopy(net).to(dtype))


def dtypes(net: nn.Module) -> dict[str, torch.dtype]:
    return {key: t.dtype for key, t in net.state_dict().items()}


def road_meta(layer: Layer) -> None:
    net, x = layer.net(), layer.x()
    empty = layer.net(device="meta").to_empty(device="cpu")
    empty.load_state_dict(net.state_dict())
    require_same(empty(x), net(x), 0.0)


def road_copies(layer: Layer) -> None:
    net, x = layer.net(), layer.x()
    require_same(copy.deepcopy(net)(x), net(x), 0.0)
    require_same(pickle.loads(pickle.dumps(net))(x), net(x), 0.0)


def road_file_of_16_bits(layer: Layer) -> None:
    net = layer.net()
    state = {k: t.bfloat16() if t.is_floating_point() else t for k, t in net.state_dict().items()}
    has_coordinates = any(m.coordinate_keys() for m in net.modules() if isinstance(m, CoordinateParameters))
    try:
        net.load_state_dict(state)
    except errors.CheckpointError:
        assert has_coordinates or any(orthogonal_weights(net))
    else:
        assert not has_coordinates


def road_double_backward(layer: Layer) -> None:
    net = layer.net(dtype=torch.float64)
    x = layer.x(2, 8, torch.float64).requires_grad_()

    def slope(x: Tensor) -> Tensor:
        loss = torch.stack([t.abs().square().mean() for t in tensors(net(x))]).sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    v, g = torch.randn(x.shape, dtype=x.dtype, generator=seeds.generator(2)), slope(x)
    (second,) = torch.autograd.grad((g * v).sum(), x)
    step = 1e-6
    differences = (slope(x + step * v) - slope(x - step * v)).detach() / (2 * step)
    require_same(second, differences, 1e-5)


def road_vmap(layer: Layer) -> None:
    net = layer.net()
    samples = torch.stack([layer.x(), 0.5 * layer.x()])
    found = torch.vmap(lambda x: tuple(tensors(net(x))))(samples)
    require_same(found, [torch.stack(pair) for pair in zip(*(tensors(net(x)) for x in samples), strict=True)])


def road_functional_call(layer: Layer) -> None:
    net, x = layer.net(), layer.x()
    own = {name: p for name, p in net.named_parameters() if p.requires_grad}
    require_same(torch.func.functional_call(net, own, (x,)), net(x), 0.0)

    def loss(own: Any) -> Tensor:
        found = tensors(torch.func.functional_call(net, own, (x,)))
        return torch.stack([t.abs().square().mean() for t in found]).sum()

    grads = torch.func.grad(loss)({key: p.detach() for key, p in own.items()})
    require_same(pytree.tree_leaves(grads), gradients(net, net, x)[1:])


def road_checkpoint(layer: Layer) -> None:
    net, x = layer.net(), layer.x()
    require_same(gradients(net, lambda x: checkpoint(net, x, use_reentrant=False), x), gradients(net, net, x))


ROADS = {name.removeprefix("road_"): road for name, road in vars().copy().items() if name.startswith("road_")}
SLOW = {"compile_dynamic", "onnx"}
CASES = [
    pytest.param(layer, road, marks=pytest.mark.slow if road in SLOW else (), id=f"{layer}-{road}")
    for layer in LAYERS
    for road in ROADS
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("layer", "road"), CASES)
def test_every_layer_goes_every_road(layer, road):
    word = SENTENCES.get((layer, road))
    if word is None:
        ROADS[road](LAYERS[layer])
        return
    with pytest.raises(Exception, match=word):
        ROADS[road](LAYERS[layer])


def test_every_layer_is_in_the_table():
    made = {
        name for name in sk.nn.__all__ if inspect.isclass(kind := getattr(sk.nn, name)) and issubclass(kind, nn.Module)
    }
    made -= {"Adapter", "Rotated", "KeyRotation"}  # abstract; a whole decoder; a part of an attention of transformers
    assert made <= {name.split()[0] for name in LAYERS}
