"""An error of the user is one sentence, which comes before the first measurement and writes nothing."""

from pathlib import Path

import pytest

from stiefelkit.cli import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench parametrizations --parametrizations cayly", 'did you mean "cayley"'),
        ("bench parametrizations --sizes 4x8", "got 4 x 8"),
        ("bench parametrizations --device cuda:99", "99"),
        ("bench parametrizations --apart", "batch"),
        ("bench parametrizations --json nowhere/rows.json", "nowhere"),
        ("bench optimizers --optimizers cayley_sdg", 'did you mean "cayley_sgd"'),
        ("bench optimizers --optimizers geoopt_sgd", "geoopt_sgd_"),
        ("bench scan --cases H", "known: A, B, C, D, E, F, G"),
        ("bench scan --case T=3", "T=784"),
        ("bench scan --case T=0,n=2,B=2", "T >= 1"),
        ("bench scan --activation tanh --cases D", "'tanh'"),
        ("drift --methods geoopt_sgd", "geoopt_sgd_"),
        ("drift --look-every 0", "look_every"),
        ("drift --optimizer torch.nn:Linear", "subclass of Optimizer"),
        ("drift --map no_such_module:Map", "'no_such_module:Map' to import"),
        ("report --sections drifts", "drifts"),
        ("report --out nowhere/report.html", "existing folder"),
        ("report --full --quick", "--full or --quick, got both"),
    ],
)
def test_an_error_of_the_user_is_one_sentence(words, says, capsys):
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    (sentence,) = err.splitlines()
    assert says in sentence
    assert not list(Path().iterdir())
