"""Every layer of `sk.nn` goes every road of `roads.py`: it gives there what it gives by itself, or says why not."""

import inspect

import pytest
from roads import LAYERS, ROADS, SENTENCES, SLOW
from torch import nn

import stiefelkit as sk

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
