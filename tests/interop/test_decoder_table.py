"""Each family of decoders, by what is done with it: its logits stay, or a sentence refuses it."""

import pytest

pytest.importorskip("transformers")

from decoder_table import BOUNDS, COLUMNS, KINDS, cell

MODULES = {"PEFT": "peft", "quanto": "optimum.quanto", "transforms": "compressed_tensors"}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_or_a_sentence_refuses_them(kind, column):
    pytest.importorskip(MODULES.get(column, "torch"))
    found = cell(kind, column)
    if isinstance(found, str):
        assert column == "transforms"
        assert " needs " in found
    else:
        assert found <= BOUNDS.get(column, 1e-6)
