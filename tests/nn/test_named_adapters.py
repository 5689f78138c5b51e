"""Adapters of a model by name: switched, applied one after another, deleted, saved apart from the base."""

import copy
from typing import Any

import pytest
import torch
from moved_adapters import drawn, moved
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import CheckpointError, NonFiniteError, OptionError, UnknownNameError
from stiefelkit.testing import seeds

CLOSE = 4e-6
X = drawn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()))


def net(*names: str, **options: Any) -> Any:
    torch.manual_seed(seeds.seed())
    model: Any = Net()
    for key, name in enumerate(names, 1):
        sk.nn.adapt(model, ["a.weight", "b.weight"], name=name, block_size=4, **options)
        moved(model, name, 7 * key)
    return model.eval()


def rotations(model: Any, name: str) -> list[Tensor]:
    return [m.rotation.matrix.detach() for m in sk.nn.adapters(model).values() if m.name == name]


@pytest.mark.parametrize("side", ["in", "out"])
def test_adapters_of_one_layer_act_one_after_another_and_merge_to_one_matrix(side: str):
    model = net("first", "second", side=side)
    (first, _), (second, _) = rotations(model, "first"), rotations(model, "second")
    w = model.a.base.weight
    expected = w @ second @ first if side == "in" else first @ second @ w
    torch.testing.assert_close(model.a.weight, expected, rtol=0, atol=CLOSE)
    before = model(X)
    model.a.merge()
    torch.testing.assert_close(model(X), before, rtol=0, atol=CLOSE)
    folded: Any = sk.nn.fold(copy.deepcopy(model))
    assert torch.equal(folded.a.weight, model.a.merged)


def test_what_is_switched_off_does_nothing_to_the_bit():
    bare, both = net(), net("first", "second")
    alone = {name: net(*names)(X) for name, names in (("first", ["first"]), ("none", []))}
    sk.nn.use_adapters(both, "first")
    assert torch.equal(both(X), alone["first"])
    assert torch.equal(both.a.weight, net("first").a.weight)
    sk.nn.use_adapters(both, ())
    assert torch.equal(both(X), bare(X))
    both.a.merge()
    sk.nn.use_adapters(both, ["second", "first"])
    assert both.a.merged is None
    assert torch.equal(both(X), net("first", "second")(X))
    assert torch.equal(bare(X), alone["none"])


def test_without_adapters_a_model_is_its_base_merged_or_not_and_is_restored_after_an_error():
    bare, model = net(), net("first", "second")
    sk.nn.use_adapters(model, "second")
    model.a.merge()
    before = model(X)
    with sk.nn.without_adapters(model):
        assert torch.equal(model(X), bare(X))
    with pytest.raises(RuntimeError), sk.nn.without_adapters(model):
        model(X[:, :3])
    assert torch.equal(model(X), before)
    assert model.a.merged is not None


def test_what_happens_inside_without_adapters_never_merges_the_base_alone():
    model, other = net("first", "second"), net("first", "second")
    moved(other, "first", 50)
    state, before = other.state_dict(), model(X)
    all_of_it = list(sk.nn.adapters(model).values())
    with sk.nn.without_adapters(model), pytest.raises(OptionError, match="is on"):
        sk.nn.fold(model)
    with sk.nn.without_adapters(model):
        for one in all_of_it:
            one.merge()
    assert torch.equal(model(X), before)
    with sk.nn.without_adapters(model):
        sk.nn.use_adapters(model, "first")
        for one in all_of_it:
            if one.is_on:
                one.merge()
    assert torch.equal(model(X), before)
    for one in all_of_it:
        one.merge()
    with sk.nn.without_adapters(model):
        model.load_state_dict(state)
        sk.nn.adapt(model, "a", "householder", name="third")
        model.a.merge()
    torch.testing.assert_close(model(X), other(X), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("key", ["weight", "bias", "in_features", "out_features"])
def test_what_an_adapter_reads_from_its_layer_is_set_on_the_layer(key: str):
    model = net("first", "second")
    sk.nn.adapt(model, "a", name="third", block_size=4, modules_to_save="head")
    before = model(X)
    for one in (model.a, model.b, model.head):
        setattr(one, key, getattr(one.base, key))
        with pytest.raises(OptionError, match="`base`"):
            setattr(one, key, 7 if key.endswith("features") else nn.Parameter(torch.ones(8, 8)))
    assert torch.equal(model(X), before)


def test_a_deleted_adapter_leaves_the_others():
    model = net("first", "second", "third")
    assert sk.nn.delete_adapter(model, "second") is model
    assert [m.name for m in sk.nn.adapters(model).values()] == ["first", "third"] * 2
    first, third = rotations(model, "first")[0], rotations(model, "third")[0]
    torch.testing.assert_close(model.a.weight, model.a.base.weight @ third @ first, rtol=0, atol=CLOSE)
    for name in ("first", "third"):
        sk.nn.delete_adapter(model, name)
    assert torch.equal(model(X), net()(X))
    assert isinstance(model.a, nn.Linear)
    layer = sk.nn.delete_adapter(sk.nn.adapt(nn.Linear(8, 8), "weight"), "default")
    assert isinstance(layer, nn.Linear)


def test_names_are_those_without_adapters():
    model = net("first")
    assert model.head.weight.requires_grad
    assert not model.a.layer.weight.requires_grad
    model.a.merge()
    sk.nn.adapt(model, "a.weight", name="second", block_size=2)
    assert model.a.layer.merged is None
    sk.nn.adapt(model, "b", name="second", block_size=2)
    assert list(sk.nn.adapters(model)) == ["a", "a.layer", "b", "b.layer"]
    with pytest.raises(OptionError, match="another name"):
        sk.nn.adapt(model, ["a", "b"], name="second", block_size=2)


def test_the_base_has_the_keys_and_bits_that_it_had():
    bare, model = net(), net("first", "second", modules_to_save="head")
    expected = bare.state_dict()
    got = sk.nn.base_state(model)
    assert list(got) == list(expected)
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    assert sk.nn.base_state(bare).keys() == expected.keys()


def test_adapters_travel_alone_under_the_keys_of_a_model_that_has_no_others():
    model = net("first", "second", modules_to_save=["head"])
    state = {key: value.clone() for key, value in sk.nn.adapter_state(model, "second").items()}
    alone = net("second")
    assert {key for key in state if "head" not in key} == {key for key in alone.state_dict() if ".rotation." in key}
    assert {key for key in state if "head" in key} == {"head.copy.weight", "head.copy.bias"}
    other = net("x", "y", "z", modules_to_save=["head"])
    sk.nn.load_adapter_state(other, state, "y")
    for each, name in ((model, "second"), (other, "y")):
        sk.nn.use_adapters(each, name)
    assert torch.equal(other(X), model(X))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda state: state.pop(next(iter(state))), "missing"),
        (lambda state: state.update(b=X), "left over"),
        (lambda state: state.update({"head.copy.bias": X}), "shape"),
        (lambda state: state.update({"head.copy.bias": torch.ones(3, dtype=torch.complex64)}), "complex64"),
        (lambda state: state.update({key: v / 0 for key, v in state.items() if "original0" in key}), "finite|NaN"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: Any, word: str):
    model = net("first", modules_to_save=["head"])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value + (value.dtype != torch.uint8) for key, value in sk.nn.adapter_state(model, "first").items()}
    change(state)
    with pytest.raises((CheckpointError, NonFiniteError), match=word):
        sk.nn.load_adapter_state(model, state, "first")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_modules_to_save_are_trained_in_a_copy_for_each_name():
    model = net("first", "second", modules_to_save=["head"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "rotation" not in name} == {
        f"head.{path}copy.{name}" for path in ("", "layer.") for name in ("weight", "bias")
    }
    model = net("first", modules_to_save=["head"])
    frozen, y = net()(X), model(X)
    with sk.nn.without_adapters(model):
        assert torch.equal(model(X), frozen)
    assert model.head.out_features == 3
    assert torch.equal(model.head.weight, model.head.copy.weight)
    folded = sk.nn.fold(model)
    assert type(folded.head) is nn.Linear
    torch.testing.assert_close(folded(X), y, rtol=0, atol=CLOSE)


def test_two_copies_of_one_module_are_not_on_together():
    model = net("first", "second", modules_to_save=["head"])
    for act in (lambda: model(X), lambda: sk.nn.fold(model), lambda: sk.nn.use_adapters(model, ["first", "second"])):
        with pytest.raises(OptionError, match="use_adapters"):
            act()
    for name in ("first", "second"):
        sk.nn.use_adapters(model, name)
        copies = [p for key, p in model.named_parameters() if "copy" in key]
        used = torch.autograd.grad(model(X).sum(), copies, allow_unused=True)
        assert [g is not None for g in used] == [name == "second"] * 2 + [name == "first"] * 2


@pytest.mark.parametrize(
    ("act", "word"),
    [
        (lambda model: sk.nn.use_adapters(model, ["first", "frist"]), "frist"),
        (lambda model: sk.nn.load_adapter_state(model, {}, "x"), "load_adapter_state"),
        (lambda model: sk.nn.without_adapters(Net()).__enter__(), "Net"),
        (lambda model: sk.nn.adapt(model, "head", modules_to_save="hed"), "head"),
        (lambda model: sk.nn.adapt(model, "*", name="x", modules_to_save="head"), "where="),
        (lambda model: sk.nn.adapt(model, "a", "lowrank", name="x"), "low_rank"),
    ],
)
def test_what_is_not_there_is_refused_and_changes_nothing(act: Any, word: str):
    model = net("first")
    before, trained = model(X), [p.requires_grad for p in model.parameters()]
    with pytest.raises((UnknownNameError, OptionError), match=word):
        act(model)
    assert torch.equal(model(X), before)
    assert [p.requires_grad for p in model.parameters()] == trained


def test_an_adapter_of_hooks_inside_another_is_not_merged():
    model = net("first", "second")
    model.a.layer.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(OptionError, match="hooks"):
        model.a.merge()


def test_a_layer_in_two_places_is_adapted_switched_and_deleted_in_both():
    layer = nn.Linear(8, 8)
    model: Any = nn.Sequential(layer, layer).requires_grad_(False)
    for name in ("first", "second"):
        moved(sk.nn.adapt(model, "1.weight", name=name, block_size=4), name)
    assert model[0] is model[1]
    assert len(sk.nn.adapters(model)) == 2
    assert list(sk.nn.base_state(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    other: Any = nn.Sequential(layer, layer)
    sk.nn.adapt(other, "0", name="x", block_size=4)
    sk.nn.load_adapter_state(other, sk.nn.adapter_state(model, "second"), "x")
    sk.nn.use_adapters(model, "second")
    assert torch.equal(other(X), model(X))
    sk.nn.delete_adapter(model, "first")
    sk.nn.delete_adapter(model, "second")
    assert model[0] is layer
    assert model[1] is layer


def test_what_was_saved_before_adapters_had_names_loads():
    model: Any = net("first")
    for adapter in sk.nn.adapters(model).values():
        for key in ("name", "is_on", "_layout"):
            vars(adapter).pop(key, None)
    other = copy.deepcopy(model)
    assert [m.name for m in sk.nn.adapters(other).values()] == ["default"] * 2
    assert torch.equal(other(X), net("first")(X))


@pytest.mark.parametrize("where", ["q_proj", ["*.q_proj"], lambda name, layer: False])
def test_a_pattern_that_matches_nothing_is_answered_with_the_names_without_adapters(where: Any):
    with pytest.raises(UnknownNameError, match=r"known: a\.weight, b\.weight, head\.weight\."):
        sk.nn.adapt(net("first", "second"), where, name="third")
    with pytest.raises(UnknownNameError, match=r"head\.weight"):
        sk.nn.adapt(net("first"), "heads.weight")
