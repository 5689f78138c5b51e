"""The laws of families of decoders hold for the skeleton, and catch a family that breaks them."""

import dataclasses

import pytest
from torch import nn

from stiefelkit.cli.skeletons.decoder import skeleton, small_model
from stiefelkit.errors import UnknownNameError
from stiefelkit.nn.decoders import decoders
from stiefelkit.testing import DECODER_LAWS, LawBroken, check_decoder

WRONG = {
    "known": {"classes": ("Another",)},
    "norms": {"norms": {"before_attention": ("query", "key"), "before_mlp": ("up",)}},
    "rotations": {"value": "key"},
    "learned": {"writers": ("out",)},
}


@pytest.fixture
def registered(monkeypatch):
    """Registers a family for one test."""

    def register(**changes):
        for held in ("_targets", "_loaded"):
            monkeypatch.setattr(decoders, held, dict(getattr(decoders, held)))
        decoders.register("mine", dataclasses.replace(skeleton, **changes))

    return register


def test_a_family_keeps_them_and_its_model_stays_as_it_was(registered):
    registered()
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_decoder("mine", model)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("law", DECODER_LAWS)
def test_each_law_catches_a_family_that_breaks_it_and_says_how_to_see_it_again(law, registered):
    registered(**WRONG[law])
    with pytest.raises(LawBroken, match="mine of SkeletonForCausalLM") as caught:
        check_decoder("mine", small_model(), [law], offset=7)
    assert f"check_decoder('mine', model, ['{law}'], offset=7)" in str(caught.value)


def test_names_that_are_not_there_are_refused(registered):
    registered()
    with pytest.raises(UnknownNameError, match="'lama'"):
        check_decoder("lama", nn.Linear(2, 2))
    with pytest.raises(UnknownNameError, match="norm"):
        check_decoder("mine", small_model(), ["norm"])
