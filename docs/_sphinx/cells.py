"""Pages stay plain Markdown: a fence ```python is a cell that runs at build, ```py is code that is only shown.

What stands behind the language are tags of the cell, as in "```python hide-input".
"""

import re

from docutils import nodes
from kernels import NAME

HEADER = f"""---
file_format: mystnb
kernelspec:
  name: {NAME}
language_info:
  name: python
  pygments_lexer: ipython3
---
"""
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def as_cells(text: str) -> str:
    """Returns a page whose Python runs; one without Python as it is."""
    if not FENCE.search(text):
        return text

    def cell(match):
        tags = f":tags: [{', '.join(match[1].split())}]\n" if match[1].strip() else ""
        return f"```{{code-cell}} python\n{tags}{match[2]}```"

    return HEADER + FENCE.sub(cell, text)


def described(app, doctree):
    """Gives pictures that a cell has drawn words for those who do not see them, in the place of a file's name."""
    for image in doctree.findall(nodes.image):
        image.attributes.setdefault("alt", "What the code above draws")


def setup(app):
    app.connect("doctree-read", described)
    app.connect("source-read", lambda app, name, source: source.__setitem__(0, as_cells(source[0])))
    return {"parallel_read_safe": True}
