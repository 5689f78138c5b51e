"""Markdown of the repository above docs/, taken in where a page has nothing but an include of it, with its links."""

import re
from pathlib import Path

INCLUDE = re.compile(r"\A```\{include\} \.\./([\w/]+\.md)\n```\n\Z")
LINK = re.compile(r"\]\(([\w./-]+\.md)(#[\w-]*)?\)")
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "benchmarks/README.md": "suite.md"}


def taken_in(app, docname, source):
    """Puts the file in the place of its include, and has links to files lead to their pages."""
    found = INCLUDE.match(source[0])
    if not found:
        return
    root = Path(app.srcdir).parent
    path = root / found[1]
    app.env.note_dependency(str(path))

    def of_page(link):
        target = (path.parent / link[1]).resolve().relative_to(root.resolve()).as_posix()
        return f"]({PAGES.get(target) or target.removeprefix('docs/')}{link[2] or ''})"

    source[0] = LINK.sub(of_page, path.read_text())


def setup(app):
    app.connect("source-read", taken_in, priority=400)
    return {"parallel_read_safe": True}
