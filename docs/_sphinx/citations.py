"""Which entries of references.bib a text names, by title or as "Arjovsky et al. 2016". Needs no Sphinx."""

import inspect
import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import NamedTuple

BIBLIOGRAPHY = Path(__file__).parents[1] / "references.bib"
SHORT = re.compile(r"\b([A-Z][\w'-]+) (?:et al\.|and [A-Z][\w'-]+) (\d{4})\b")
BEGINS = re.compile(r"[A-Z][\w'-]+(?:,| et al\.)")
CITED = re.compile(r"\{cite(?::\w+)?\}`([\w,\s]+)`")


class Entry(NamedTuple):
    """A line of references.bib: its title as it reads, its first author's surname, its year."""

    title: str
    surname: str
    year: str


@cache
def bibliography():
    """Returns key to entry."""
    made = {}
    for line in BIBLIOGRAPHY.read_text().splitlines():
        key = re.match(r"@\w+\{(\w+),", line)[1]
        title = re.search(r" title=\{(.*?)\}, \w+=", line)[1]
        made[key] = Entry(
            plain(title), plain(re.search(r"author=\{([^,]+),", line)[1]), re.search(r"year=\{(\d+)", line)[1]
        )
    return made


def plain(text):
    """Returns words without capitals, accents and marks."""
    text = unicodedata.normalize("NFKD", re.sub(r"\\\W|\\\w\s|[{}]", "", text)).encode("ascii", "ignore").decode()
    return " ".join(re.findall(r"\w+", text.lower()))


def named(text):
    """Returns the keys of what the text names by its title."""
    words = f" {plain(text)} "
    return [key for key, entry in bibliography().items() if f" {entry.title} " in words]


def short(surname, year):
    """Returns the key of what is called "Surname et al. year", or None."""
    keys = [key for key, entry in bibliography().items() if (entry.surname, entry.year) == (plain(surname), year)]
    return keys[0] if len(keys) == 1 else None


def references(doc):
    """Returns the entries under "References:" of a docstring, each as one line."""
    _, heading, rest = inspect.cleandoc(doc or "").partition("References:\n")
    entries = []
    for line in rest.splitlines() if heading else []:
        if not line.startswith("    "):
            break
        if not entries or (entries[-1].endswith(".") and BEGINS.match(line.strip())):
            entries.append(line.strip())
        else:
            entries[-1] += f" {line.strip()}"
    return entries
