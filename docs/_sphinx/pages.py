"""Writes the pages that are made from the package: the API, one page a parametrization, an optimizer, a minimizer.

They come from the registries, so that what is added there, or installed, has its page without a line here.
"""

from pathlib import Path

import commands
import members
import reference

FOLDER = "generated"
TREES = {}


def write(app):
    """Writes what has changed since the last build, and removes pages of what is gone."""
    root = Path(app.srcdir) / FOLDER
    rooms = reference.rooms()
    pages = {f"api/{room.name}.rst": reference.page(room) for room in rooms}
    pages["api/index.md"] = _index(rooms)
    pages |= members.pages()
    pages["cost.md"] = members.cost()
    pages["api/commands.md"] = commands.page()
    for path in [*root.rglob("*.md"), *root.rglob("*.rst")] if root.exists() else []:
        if str(path.relative_to(root)) not in pages:
            path.unlink()
    for name, text in pages.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    members.draw(root)


def _index(rooms):
    rows = "\n".join(f"| [`{room.name}`]({room.name}.rst) | {room.summary} |" for room in rooms)
    names = "\n".join(["commands", *(room.name for room in rooms)])
    return (
        "# API\n\nEvery public name: what it takes, shapes and dtypes, what it raises, and its source.\n"
        "`import stiefelkit as sk` gives `sk.orthogonal`, `sk.nn`, and so on, each imported when it is first asked for."
        "\n[Commands](commands.md) has the command line.\n\n"
        f"| module | |\n|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    )


def one_tree(app, name, template, context, doctree):
    """Has pages of source code, which stand in no tree of pages, share one for each depth: each takes half a second."""
    if name.startswith("_modules/"):
        trees, tree, depth = TREES.setdefault(app.outdir, {}), context["toctree"], name.count("/")

        def shared(**options):
            key = depth, *options.items()
            if key not in trees:
                trees[key] = tree(**options)
            return trees[key]

        context["toctree"] = shared


def setup(app):
    app.connect("builder-inited", write)
    app.connect("html-page-context", one_tree, priority=400)  # furo draws the tree at 500
    return {"parallel_read_safe": True}
