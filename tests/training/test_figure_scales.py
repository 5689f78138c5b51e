"""Curves of one figure can be told apart, and accuracies are drawn where they differ."""

import pytest

from stiefelkit.training.figure import accuracy_scale, figure, styles


def test_forty_nine_curves_look_differently():
    looks = {tuple(sorted(look.items())) for look in styles(49)}
    assert len(looks) == 49


def test_ninety_to_ninety_five_percent_take_as_much_room_as_fifty_to_sixty_eight(tmp_path):
    with figure(tmp_path / "accuracies.png", 1) as (axes,):
        axes.plot([1, 2, 3], [0.3, 0.9, 1.0])
        accuracy_scale(axes)

        def height(value):
            return axes.transData.transform((1, value))[1]

        ratio = (height(0.95) - height(0.9)) / (height(0.679) - height(0.5))
        assert ratio == pytest.approx(1, abs=0.01)
        assert axes.yaxis.get_major_formatter()(0.95) == "95"
    assert (tmp_path / "accuracies.png").stat().st_size > 0
