"""A model is loaded as a whole: what one orthogonal weight refuses leaves every layer as it was."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import coordinate_dtypes
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing.seeds import generator
from stiefelkit.weights import checkpoint

INSIDE = "parametrizations.weight."


def layer(n=4, name="cayley", **options):
    return sk.orthogonal(nn.Linear(n, n), "weight", name, **options)


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 4), layer(), nn.Sequential(nn.BatchNorm1d(4), layer()), layer(name="givens"))


def kept(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(module, before):
    return all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_what_the_last_layer_refuses_leaves_the_first_alone(assign, strict):
    ours, state = model(), kept(model())
    state["3." + INSIDE + "original0"][0] = torch.nan
    before = kept(ours)
    identities = [id(p) for p in ours.parameters()]
    with pytest.raises(errors.NonFiniteError, match=r"3\.weight"):
        ours.load_state_dict(state, strict=strict, assign=assign)
    assert same(ours, before)
    assert identities == [id(p) for p in ours.parameters()]


def chosen() -> Any:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4))}))
    return sk.orthogonal(plain, "1.b.0.weight", init="haar")


def made_around() -> Any:
    return nn.ModuleDict({"plain": nn.Linear(4, 4), "inner": chosen()})


HOLDERS: list[Any] = [chosen, made_around, lambda: chosen()[1], lambda: copy.deepcopy(made_around())]
HOLDERS += [lambda: copy.deepcopy(model()), lambda: pickle.loads(pickle.dumps(model()))]
HOLDERS += [lambda: nn.ModuleDict({"inner": model()}), lambda: torch.compile(model(), backend="eager")]


@pytest.mark.parametrize("make", HOLDERS)
def test_whoever_holds_the_weight_is_checked_as_a_whole(make):
    ours, state = make(), kept(make())
    *_, bad = (key for key in state if key.endswith(INSIDE + "original0"))
    state[bad][0] = torch.nan
    before = kept(ours)
    with pytest.raises(errors.NonFiniteError):
        ours.load_state_dict(state)
    assert same(ours, before)


def test_a_model_around_a_module_that_got_its_weights_later_is_checked_beforehand():
    outer = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    sk.orthogonal(outer[1], "1.weight")
    state = kept(outer)
    state["0.weight"] += 1
    state["1.0.weight"] += 1
    state["1.1." + INSIDE + "original0"][0] = torch.nan
    before = kept(outer)
    with pytest.raises(errors.NonFiniteError):
        sk.check_state_dict(outer, state)
    assert same(outer, before)
    with pytest.raises(errors.NonFiniteError):
        outer.load_state_dict(state)
    assert same(outer[1], {key.removeprefix("1."): value for key, value in before.items() if key.startswith("1.")})


def test_a_weight_is_checked_once_a_load(monkeypatch):
    ours, checks = made_around(), []
    check_state = checkpoint.check_state
    monkeypatch.setattr(checkpoint, "check_state", lambda *args: checks.append(1) or check_state(*args))
    for count in (1, 2):
        ours.load_state_dict(kept(ours))
        assert len(checks) == count


def test_a_shared_module_is_checked_under_each_of_its_names():
    shared = layer()
    ours = nn.ModuleDict({"a": shared, "z": nn.Linear(4, 4), "b": shared})
    state = kept(ours)
    state["b." + INSIDE + "original0"] = torch.full((6,), torch.inf)
    state["z.weight"] += 1
    before = kept(ours)
    with pytest.raises(errors.NonFiniteError, match=r"b\.weight"):
        ours.load_state_dict(state)
    assert same(ours, before)


def test_what_torch_refuses_in_a_plain_layer_leaves_orthogonal_ones_whole():
    ours, state = model(), kept(model())
    state["0.weight"] = torch.zeros(5, 5)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_state_dict(state)
    assert all(drift.error < 1e-6 for drift in sk.drift(ours).values())


class Renaming(nn.Module):
    """Loads checkpoints of its past, in which the weight was plain."""

    def __init__(self):
        super().__init__()
        self.rotation = layer()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        plain = state.pop(f"{prefix}rotation.weight", None)
        if plain is not None:
            donor = copy.deepcopy(module.rotation)
            donor.weight = plain
            state.update({f"{prefix}rotation.{key}": value for key, value in donor.state_dict().items()})


def test_a_load_hook_may_still_change_what_is_below_it():
    ours = Renaming()
    w = sk.init.haar((4, 4), generator=generator(1)).float()
    ours.load_state_dict({"rotation.weight": w, "rotation.bias": torch.zeros(4)})
    assert torch.allclose(ours.rotation.weight, w, atol=1e-6)
    with pytest.raises(errors.NonFiniteError):
        ours.load_state_dict(kept(ours) | {"rotation." + INSIDE + "original0": torch.full((6,), torch.nan)})


@pytest.mark.parametrize("state", [[], {3: torch.zeros(1)}])
def test_what_is_no_state_dict_is_refused(state):
    with pytest.raises(errors.CheckpointError, match="needs a"):
        sk.check_state_dict(model(), state)


def test_a_weight_that_coordinates_would_make_nan_is_refused():
    ours = layer(name="matrix_exp").double()
    before = kept(ours)
    state = before | {INSIDE + "original0": torch.full((6,), 1e300, dtype=torch.float64)}
    with pytest.raises(errors.StiefelkitError, match="whose weight is a frame"):
        ours.load_state_dict(state)
    assert same(ours, before)
    ours.load_state_dict(before | {INSIDE + "original0": torch.full((6,), 1e4, dtype=torch.float64)})
    assert sk.drift(ours)["weight"].error < 1e-12


def test_script_modules_have_no_weight_that_could_be_made_orthogonal():
    scripted = torch.jit.script(nn.Linear(3, 3))
    for module, name in ((scripted, "weight"), (nn.Sequential(scripted), "0.weight")):
        with pytest.raises(errors.OptionError, match="script"):
            sk.orthogonal(module, name)
        with pytest.raises(errors.UnknownNameError, match="only a plain one"):
            sk.assign_(module, name, torch.eye(3))
    beside = sk.orthogonal(nn.Sequential(scripted, nn.Linear(3, 3)), where="*")
    assert set(sk.drift(beside)) == {"1.weight"}


@pytest.mark.parametrize(
    "attach",
    [
        lambda: sk.orthogonal(nn.Linear(4, 3), "weight", "cayley"),
        lambda: sk.orthogonal(nn.Linear(4, 4), "weight", "cayley", gain="learned"),
        lambda: sk.orthogonal(nn.Linear(2, 4), "weight", "cayley", blocks=2),
    ],
    ids=["viewed", "scaled", "side by side"],
)
def test_no_file_decides_what_a_checkpoint_calls_a_wrapper(attach, monkeypatch):
    layer = attach()
    state = layer.state_dict()
    wrapper = type(layer.parametrizations.weight[0])
    assert wrapper.__name__ in ("Viewed", "Scaled", "SideBySide")
    monkeypatch.setattr(wrapper, "__module__", "elsewhere")
    again = attach()
    again.load_state_dict(state)
    assert torch.equal(again.weight, layer.weight)
    description = "parametrizations.weight._extra_state"
    assert torch.equal(again.state_dict()[description], state[description])


def by_load(module, state):
    module.load_state_dict(state)


def by_assign(module, state):
    module.load_state_dict(state, assign=True)


def by_copy(module, state):
    with torch.no_grad():
        for key, t in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
            t.copy_(state[key])


def by_another_tensor(module, state):
    """As loaders do that go key by key and leave each tensor in the dtype of the file."""
    for key, value in state.items():
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        if name in owner._parameters:
            owner._parameters[name] = nn.Parameter(value.clone())
        else:
            owner._buffers[name] = value.clone()


DTYPES: Any = {"bf16": torch.bfloat16, "half": torch.half, "float": torch.float32, "double": torch.float64}
CASTS = [(a, b) for a in DTYPES for b in DTYPES if a != b]


@pytest.mark.parametrize("load", [by_load, by_assign, by_copy, by_another_tensor])
@pytest.mark.parametrize("pair", CASTS, ids="-".join)
@pytest.mark.parametrize("name", [name for name in sk.available() if name not in ("fourier", "margin")])
def test_a_checkpoint_of_another_dtype_gives_frames_to_the_limit_of_the_model(name, pair, load):
    n = 8 if name == "hadamard" else 6
    made: list[Any] = [sk.orthogonal(nn.Linear(n, n, dtype=DTYPES[each]), "weight", name) for each in pair]
    theirs, ours = made
    load(ours, theirs.state_dict())
    held: Any = ours.get_submodule("parametrizations.weight")
    for w in (ours.weight, ours.eval().weight):
        assert w.dtype is DTYPES[pair[1]]
        # two limits and the eps of small frames; float64 maps and steps promise 20
        bound = (20 if w.dtype is torch.float64 else 2) * rounding_limit(n, w.dtype) + torch.finfo(w.dtype).eps
        assert orthogonality_error(w).item() <= bound
        # well above what rounding of coordinates leaves, well below another weight
        assert torch.dist(w.double(), theirs.weight.double()) <= max(torch.finfo(DTYPES[e]).eps for e in pair) ** 0.5
    if load is not by_copy:
        assert {key: c.dtype for key, c in held.coordinates.items()} == coordinate_dtypes(held.param)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["stiefel", "cayley", "margin"])
def test_a_description_without_coordinates_is_half_a_weight(name, strict):
    ours = sk.orthogonal(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "1.weight", name)
    state = {key: value + 1 for key, value in kept(ours).items() if not key.startswith("1." + INSIDE)}
    state["1." + INSIDE + checkpoint.EXTRA] = kept(ours)["1." + INSIDE + checkpoint.EXTRA]
    before = kept(ours)
    with pytest.raises(errors.CheckpointError, match="coordinates"):
        ours.load_state_dict(state, strict=strict)
    assert same(ours, before)
    assert ours.load_state_dict(kept(nn.Sequential(nn.Linear(4, 4))), strict=False).missing_keys


def test_a_shared_module_may_be_saved_under_one_of_its_names():
    one = layer()
    ours = nn.ModuleDict({"a": one, "b": one})
    state = {key: value for key, value in kept(ours).items() if key != "a." + INSIDE + "original0"}
    state = {key: value for key, value in state.items() if key != "a." + INSIDE + "0.signs"}
    sk.check_state_dict(ours, state)
    ours.load_state_dict(state, strict=False)
