"""Markdown of the repository above docs/, where a page is an include of it; links from names to the API."""

import re
from pathlib import Path

from docutils import nodes

INCLUDE = re.compile(r"\A```\{include\} \.\./([\w/]+\.md)\n```\n\Z")
LINK = re.compile(r"\]\(([\w./-]+\.md)(#[\w-]*)?\)")
NAME = re.compile(r"(sk\.)?([\w.]+)(\(.*\))?", re.DOTALL)
ROOMS = ("", ".optim", ".nn", ".functional")
UNSEARCHED = "---\nnosearch: true\n---\n"
"""Front matter of the changelog, which has every word and explains none."""
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

    front = UNSEARCHED if docname == "changelog" else ""
    source[0] = front + LINK.sub(of_page, path.read_text())


def to_api(app, doctree, docname):
    """Links `sk.name`, a call of it, and a class of ours by its bare name to where the API describes it."""
    objects = app.env.domains["py"].objects
    for literal in list(doctree.findall(nodes.literal)):
        found = NAME.fullmatch(literal.astext())
        if found is None or not isinstance(literal.parent, nodes.paragraph | nodes.entry | nodes.strong):
            continue
        names = [f"stiefelkit.{found[2]}"]
        if not found[1]:
            names = [f"stiefelkit{room}.{found[2]}" for room in ROOMS if found[2][0].isupper()]
        for entry in [objects[name] for name in names if name in objects][:1]:
            address = app.builder.get_relative_uri(docname, entry.docname)
            link = nodes.reference("", "", internal=True, refuri=f"{address}#{entry.node_id}")
            literal.replace_self(link)
            link += literal


def setup(app):
    app.connect("source-read", taken_in, priority=400)
    app.connect("doctree-resolved", to_api)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
