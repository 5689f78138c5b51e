"""Modules of docs/_sphinx, by which pages are built, by name."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@cache
def sphinx_part(name: str) -> Any:
    folder = str(ROOT / "docs" / "_sphinx")
    sys.path.insert(0, folder)
    try:
        return __import__(name)
    finally:
        sys.path.remove(folder)
