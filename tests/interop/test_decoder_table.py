"""Each decoder rotated, and one of each family by what is done with it: logits stay, or a sentence refuses it."""

import pytest

pytest.importorskip("transformers")

from decoder_table import BOUNDS, COLUMNS, KINDS, cell

from stiefelkit.nn.decoders import decoders

MODULES = {"PEFT": "peft", "quanto": "optimum.quanto", "transforms": "compressed_tensors"}


FIRST = {next(iter(one.classes)).removesuffix("Model") for one in decoders.values()}
CELLS = [(kind, column) for kind in KINDS for column in COLUMNS if column == "float64" or kind in FIRST]


@pytest.mark.parametrize(("kind", "column"), CELLS)
def test_logits_stay_or_a_sentence_refuses_them(kind, column):
    pytest.importorskip(MODULES.get(column, "torch"))
    found = cell(kind, column)
    if isinstance(found, str):
        assert column == "transforms"
        assert " needs " in found
    else:
        assert found <= BOUNDS.get(column, 1e-6)
