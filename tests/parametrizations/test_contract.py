"""What every map and wrapper owes the contract, and what adding one costs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.contract import table
from stiefelkit.parametrizations import View
from stiefelkit.registry import Registry
from stiefelkit.testing import check_parametrization, random_coordinates, seeds
from stiefelkit.weights.find import orthogonal_weights

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
WRAPPERS: list[Any] = [sk.parametrizations.Viewed, sk.parametrizations.Scaled]
VIEW: dict[str, Any] = {"view": "out_by_rest"}
BUILT_IN = [cls for cls in sk.available().values() if cls.__module__.startswith("stiefelkit.")]


def test_a_map_is_one_file_and_one_line(tmp_path, monkeypatch):
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "turns.py").write_text(example)
    folder = tmp_path / "turns-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: turns\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[stiefelkit.parametrizations]\nturns = turns:PlaneRotations\n")
    monkeypatch.syspath_prepend(tmp_path)
    check = table.registered._check_kind
    fresh = Registry("stiefelkit.parametrizations", "parametrization", {}, check)
    monkeypatch.setattr(table, "registered", fresh)
    cls = sk.available()["turns"]
    assert sk.parametrizations.PlaneRotations is cls
    sk.nn.OrthogonalRNN(3, 4, parametrization="turns")(torch.ones(2, 5, 3))[0].sum().backward()
    cases: Any = ((lambda: nn.Linear(4, 4), {"gain": "learned"}), (lambda: nn.Conv2d(4, 4, 1), VIEW))
    for kind, options in cases:
        module, other = (sk.orthogonal(kind(), "weight", "turns", **options) for _ in range(2))
        other.load_state_dict(module.state_dict())
        assert torch.equal(other.weight, module.weight)
        assert sk.drift(module)["weight"].bits_lost < 1
    check_parametrization(cls, ["frames", "round_trip", "schemes", "contract"])


@pytest.mark.parametrize("cls", [*BUILT_IN, *WRAPPERS])
def test_no_map_overrides_what_checks_and_writes(cls):
    assert cls.right_inverse is sk.OrthogonalParam.right_inverse


@pytest.mark.parametrize("gain", [1.0, 2.0, "learned"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("name", ["cayley", "rebased", "margin", "matrix_exp"])
def test_to_solve_writes_nothing_and_to_assign_writes_what_was_solved(name, shape, gain):
    torch.manual_seed(seeds.seed(0))
    layer: Any = sk.orthogonal(nn.Linear(*shape[::-1]), "weight", name, gain=gain, init="identity")
    param = layer.parametrizations.weight.param
    frame = init.haar((max(shape), min(shape)))
    if shape == (4, 4):
        frame[:, 0] *= torch.linalg.det(frame).sign()
    w = (frame if shape[0] >= shape[1] else frame.mT) * (1.0 if gain == 1.0 else 2.0)
    before = {key: value.clone() for key, value in param.chart.items()}
    coordinates, chart = param.solve(w)
    assert all(torch.equal(value, before[key]) for key, value in param.chart.items())
    layer.weight = w
    for own, c in zip(layer.parametrizations.weight.coordinates.values(), coordinates, strict=True):
        assert torch.equal(own, c)
    for key, value in chart.items():
        assert torch.equal(param.chart[key], value.to(param.chart[key]))


def test_weights_of_a_model_are_found_by_name_host_and_coordinate_list():
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.GRUCell(4, 4))
    sk.orthogonal(model, "0.weight")
    sk.orthogonal(model, "1.weight_hh", "householder", blocks=3)
    first, second = orthogonal_weights(model)
    assert (first.qualified, first.host, first.name) == ("0.weight", model[0], "weight")
    assert first.coordinate_list is model[0].parametrizations.weight
    assert (second.qualified, second.host, second.name) == ("1.weight_hh", model[1], "weight_hh")


@pytest.mark.parametrize(
    "make",
    [
        lambda: sk.parametrizations.Cayley((4, 3), bandwidth=1),
        lambda: sk.parametrizations.Givens((4, 3), dtype=torch.complex64),
        lambda: sk.parametrizations.Viewed(
            sk.parametrizations.StiefelPoint((1, 1, 4, 3)), View("per_tap", (3, 4, 1, 1))
        ),
    ],
)
def test_a_map_fresh_from_its_constructor_is_traced_whole(make):
    param = make()
    coordinates = random_coordinates(param, 1.0, seeds.generator())
    compiled = torch.compile(make(), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(*coordinates), param(*coordinates))


class Nameless(sk.parametrizations.Cayley):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)


def test_a_class_that_does_not_name_its_options_is_told_what_to_write():
    with pytest.raises(errors.OptionError, match="names its options"):
        sk.orthogonal(nn.Linear(3, 3), "weight", Nameless, negative=1)
