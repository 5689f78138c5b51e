"""Options that are lists of words or sizes, separated by commas."""

from stiefelkit.errors import OptionError

__all__ = ["integers_of", "sizes_of", "words_of"]


def words_of(listed: str) -> tuple[str, ...]:
    """Returns the words, each once."""
    return tuple(dict.fromkeys(word.strip() for word in listed.split(",") if word.strip()))


def sizes_of(listed: str) -> tuple[tuple[int, int], ...]:
    """Returns (n, p) for each size, where n alone is n x n.

    >>> sizes_of("64,2048x32")
    ((64, 64), (2048, 32))
    """
    sizes = []
    for word in words_of(listed):
        rows, tall, columns = word.partition("x")
        try:
            sizes.append((int(rows), int(columns if tall else rows)))
        except ValueError as error:
            raise OptionError(f"--sizes needs n or NxP separated by commas, as in 64,2048x32, got {word!r}.") from error
    return tuple(sizes)


def integers_of(listed: str, option: str) -> tuple[int, ...]:
    """Returns the integers, each once.

    >>> integers_of("0,300", "--steps")
    (0, 300)
    """
    integers = []
    for word in words_of(listed):
        try:
            integers.append(int(word))
        except ValueError as error:
            raise OptionError(f"{option} needs integers separated by commas, as in 0,300, got {word!r}.") from error
    return tuple(integers)
