"""What differs on purpose from what others' suites expect: refused in a sentence, and on the page."""

from pathlib import Path

import pytest
from differences import DIFFERENCES

from stiefelkit import errors

PAGE = (Path(__file__).parent.parent.parent / "docs" / "peer-suites.md").read_text()
REFUSED = [difference for difference in DIFFERENCES if difference.attempt is not None]


@pytest.mark.parametrize("difference", REFUSED, ids=lambda difference: difference.what)
def test_what_differs_is_refused(difference):
    with pytest.raises(difference.error) as caught:
        difference.attempt()
    assert type(caught.value) is difference.error or isinstance(caught.value, errors.StiefelkitError)
    assert "\n" not in str(caught.value)


def test_the_page_shows_the_list_and_nothing_else():
    (table,) = [part for part in PAGE.split("\n\n") if part.startswith("| suite | what it does |")]
    assert table.rstrip().splitlines()[2:] == [difference.row for difference in DIFFERENCES]
