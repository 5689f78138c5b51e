"""Roads that no law of maps goes: other batch sizes of one graph, ONNX, casts up, files in 16 bits, recomputation."""

import copy

import pytest
import torch
from every_map import MAPS, close, make, squares
from torch import nn
from torch.utils.checkpoint import checkpoint

import stiefelkit as sk
from stiefelkit import errors


def compiled(layer, x):
    torch.compiler.reset()
    twin = copy.deepcopy(layer)  # a second map makes symbols of numbers that the first was given
    run = torch.compile(lambda x: layer(x) + twin(x), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 2, 7):
        assert close(run(x[:rows]), 2 * layer(x[:rows]))


def exported(layer, x, strict=False):
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(layer, (x[:2],), dynamic_shapes=({0: rows},), strict=strict)
    for batch in (x[:1], x):
        assert close(program.module()(batch), layer(batch))


def strictly_exported(layer, x):
    exported(layer, x, strict=True)


def through_onnx(layer, x):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    plain = sk.bake(copy.deepcopy(layer)).eval()
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.onnx.export(plain, (x[:2],), dynamo=True, verbose=False, dynamic_shapes=({0: rows},))
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert close(torch.from_numpy(found), layer(x))


def cast_up(layer, x):
    w = layer.weight.detach().clone()
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    y = layer.to(wide.dtype)(wide)
    assert y.dtype == layer.weight.dtype == wide.dtype
    assert close(layer.weight.to(w.dtype), w)


def from_16_bits(layer, x):
    """A file in 16 bits has no coordinates to load, and says so."""
    narrow = {torch.float32: torch.bfloat16, torch.complex64: torch.complex32}
    state = {key: value.to(narrow.get(value.dtype, value.dtype)) for key, value in layer.state_dict().items()}
    before = layer.weight.detach().clone()
    with pytest.raises(errors.CheckpointError, match=r"bfloat16|complex32"):
        layer.load_state_dict(state)
    assert torch.equal(layer.weight, before)


def recomputed(layer, x):
    leaf = x.clone().requires_grad_()
    inputs = [leaf, *layer.parameters()]
    found, expected = (
        torch.autograd.grad(squares(y), inputs) for y in (checkpoint(layer, leaf, use_reentrant=False), layer(leaf))
    )
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


ROADS = [compiled, exported, strictly_exported, through_onnx, cast_up, from_16_bits, recomputed]
"""The laws go the others: one graph and its export, casts down, autocast, copies, meta, vmap, double backward."""
ONNX_HAS = (torch.float32,)
CASES = [
    pytest.param(*case.values, road, id=f"{case.id}-{road.__name__}")
    for case in MAPS
    for road in ROADS
    if road is not through_onnx or case.values[1] in ONNX_HAS
]


@pytest.mark.parametrize(("name", "dtype", "road"), CASES)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_a_map_goes_the_road(name, dtype, road):
    layer: nn.Module = make(name, dtype)
    road(layer, torch.randn(7, 4, dtype=dtype))
