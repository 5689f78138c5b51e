"""State dicts, copies, devices and dtypes of orthogonal weights."""

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds


def make(rows=5, columns=3, dtype=None, name="cayley", **options):
    return sk.orthogonal(nn.Linear(columns, rows, dtype=dtype), "weight", name, **options)


def test_keys_are_torchs_and_one_entry_names_the_map():
    keys = set(make().state_dict())
    inside = "parametrizations.weight."
    assert keys == {"bias", inside + "original0", inside + "0.signs", inside + "_extra_state"}


def test_safetensors_bring_back_the_same_bits(tmp_path):
    layer, other = make(), make()
    save_file(layer.state_dict(), tmp_path / "w.safetensors")
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda s: s.update({"parametrizations.weight.original0": torch.zeros(5)}), errors.CheckpointError, "(9,)"),
        (lambda s: s["parametrizations.weight.original0"].fill_(torch.inf), errors.NonFiniteError, "NaN or infinity"),
        (lambda s: s.pop("parametrizations.weight._extra_state"), errors.CheckpointError, "names its map"),
        (lambda s: s.pop("parametrizations.weight.0.signs"), errors.CheckpointError, "signs"),
        (lambda s: s.update(weight=torch.zeros(5, 3)), errors.CheckpointError, "plain weight"),
        (
            lambda s: s.update({"parametrizations.weight._extra_state": torch.zeros(3, dtype=torch.uint8)}),
            errors.CheckpointError,
            "unreadable",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(spoil, error, text):
    layer = make()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    state = {key: value.clone() for key, value in make().state_dict().items()}
    spoil(state)
    for load in (sk.check_state_dict, lambda module, s: module.load_state_dict(s)):
        with pytest.raises(error) as caught:
            load(layer, state)
        assert text in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_a_partial_state_dict_without_the_weight_loads_when_not_strict():
    layer = make()
    w = layer.weight.detach().clone()
    layer.load_state_dict({"bias": torch.ones(5)}, strict=False)
    assert torch.equal(layer.weight, w)
    assert torch.equal(layer.bias, torch.ones(5))


def test_dtype_of_the_weight_follows_the_user_and_coordinates_stay_at_float32():
    layer = make()
    layer.bfloat16()
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert sk.coordinates(layer, "weight")["skew"].dtype == torch.float32
    layer.float()
    assert layer.weight.dtype == torch.float32
    layer.double()
    assert layer.weight.dtype == sk.coordinates(layer, "weight")["skew"].dtype == torch.float64


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_real_weight_cannot_become_complex():
    with pytest.raises(errors.DtypeError, match="real dtype"):
        make().to(torch.complex64)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", ["cayley", "stiefel"])
def test_meta_weights_fill_by_reset_or_load(name, dtype):
    with torch.device("meta"):
        layer = make(name=name, dtype=dtype)
    layer.to(torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    with pytest.raises(errors.UnfilledError):
        layer.weight  # noqa: B018
    for write in (lambda: sk.reset_(layer, "weight"), lambda: sk.assign_(layer, "weight", torch.eye(5, 3))):
        with pytest.raises(errors.OptionError, match="to_empty"):
            write()
    layer.to_empty(device="cpu")
    with pytest.raises(errors.UnfilledError):
        layer(torch.ones(3, dtype=dtype))
    sk.reset_(layer, "weight")
    assert sk.drift(layer)["weight"].error < 1e-6
    for assign in (True, False):
        with torch.device("meta"):
            other = make(name=name, dtype=dtype)
        (other if assign else other.to_empty(device="cpu")).load_state_dict(layer.state_dict(), assign=assign)
        assert torch.equal(other.weight, layer.weight)


def test_reset_repeats_the_scheme_and_does_not_remember_earlier_weights():
    layer = make(6, 6, init="helfrich")
    drawn = []
    for before in ("haar", "identity"):
        sk.reset_(layer, "weight", init=before)
        sk.reset_(layer, "weight", generator=seeds.generator(1))
        drawn.append(layer.weight.detach().clone())
    assert torch.equal(*drawn)
    with pytest.raises(errors.OptionError, match="nonsense"), torch.device("meta"):
        make(init="nonsense")


def test_values_may_also_arrive_by_functional_call_or_by_hand():
    layer = make()
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    hollow = copy.deepcopy(layer).to("meta")
    x = torch.ones(3)
    assert torch.equal(torch.func.functional_call(hollow, state, x), layer(x))
    hollow.to_empty(device="cpu")
    with pytest.raises(errors.UnfilledError):
        hollow(x)
    with torch.no_grad():
        for name, tensor in [*hollow.named_parameters(), *hollow.named_buffers()]:
            tensor.copy_(state[name])
    assert torch.equal(hollow(x), layer(x))


def test_a_weight_that_was_emptied_in_inference_mode_is_unfilled_until_it_is_drawn():
    with torch.device("meta"):
        layer = make()
    with torch.inference_mode():
        layer.to_empty(device="cpu")
        for unfilled in (layer, copy.deepcopy(layer)):
            with pytest.raises(errors.UnfilledError):
                unfilled(torch.ones(3))
            sk.reset_(unfilled, "weight")
            assert sk.drift(unfilled)["weight"].error < 1e-6


def test_casting_inside_a_meta_context_keeps_values():
    layer = make()
    with torch.device("meta"):
        layer.double()
        state = layer.state_dict()
    assert state["parametrizations.weight._extra_state"].device.type == "cpu"
    assert torch.isfinite(layer.weight).all()


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.channels_last_3d])
@pytest.mark.parametrize("name", ["cayley", "stiefel", "rebased"])
def test_formats_of_memory_are_for_images_and_leave_coordinates_as_they_are(name, layout, swaps):
    layer = sk.orthogonal(nn.Conv3d(3, 3, 2), "weight", name, view="per_tap")  # coordinates of four dimensions and more
    w = layer.weight.detach().clone()
    carried: Any = layer.parametrizations
    layer.weight.square().sum().backward()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        carried.to(memory_format=layout)
        assert torch.equal(layer.weight, w)
        carried.to(torch.float64, memory_format=layout)
        tensors = [*carried.parameters(), *(p.grad for p in carried.parameters()), *carried.buffers()]
        assert all(t.is_contiguous() for t in tensors)
        assert all(t.dtype == torch.float64 for t in tensors if t.is_floating_point())
        carried.to("meta", memory_format=layout)
        assert all(p.is_meta for p in carried.parameters())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class MineA(sk.parametrizations.Cayley):
    pass


class MineB(sk.parametrizations.Cayley):
    version = 2


def test_maps_are_told_apart_by_class_and_version_also_under_a_view():
    a, b = (sk.orthogonal(nn.Linear(6, 4), "weight", cls) for cls in (MineA, MineB))
    for ours, theirs in ((a, b), (b, a)):
        with pytest.raises(errors.CheckpointError, match="map"):
            ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("signs", [[0, 0, 0], [2, 1, 1], [-1, -1, -1]])
def test_a_chart_that_the_map_cannot_have_is_refused(signs):
    layer = make(3, 3, negative=1)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    state["parametrizations.weight.0.signs"] = torch.tensor(signs, dtype=torch.int8)
    with pytest.raises(errors.CheckpointError, match="signs"):
        layer.load_state_dict(state)


class Locked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "lock"}


class Delegating(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.rot = nn.Parameter(torch.eye(3))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)


def test_modules_with_their_own_state_and_attributes_keep_them(tmp_path):
    layer = sk.orthogonal(Locked(3, 3), "weight", "cayley")
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    torch.save(layer, tmp_path / "l.pt")
    assert torch.equal(torch.load(tmp_path / "l.pt", weights_only=False).weight, layer.weight)
    wrapper: Any = sk.orthogonal(Delegating(make(3, 3)), "rot", "cayley")
    assert list(sk.drift(wrapper)) == ["rot", "base.weight"]
    assert wrapper.in_features == 3


def test_a_wrapper_that_passes_attributes_on_is_not_counted_twice():
    assert list(sk.drift(torch.compile(make(), backend="eager"))) == ["_orig_mod.weight"]  # pyright: ignore


@pytest.mark.parametrize("context", [contextlib.nullcontext, sk.grouped])
def test_an_attribute_that_a_map_lacks_is_not_taken_for_the_weight(monkeypatch, context):
    net = sk.orthogonal(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "*.weight", "cayley")
    monkeypatch.setattr(sk.parametrizations.Cayley, "forward", lambda self, *coordinates: self.nonsense)
    with context(net), pytest.raises(RuntimeError, match="computed"):
        _ = net[0].weight
