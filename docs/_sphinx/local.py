"""No page fetches anything from another host: pages are read without a network, and tell nobody of their readers."""

import re
from pathlib import Path

FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\ssrc=[\"']?((?:https?:)?//[^\s\"'>]+)"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|modulepreload|icon))[^>]*?\shref=[\"']?((?:https?:)?//[^\s\"'>]+)"
    r"|(?:@import\s+|\burl\()\s*[\"']?((?:https?:)?//[^\s\"')]+)"
)


def fetched(text: str) -> list[str]:
    """Returns the addresses at other hosts that a page or a style sheet makes a browser ask for."""
    return ["".join(groups) for groups in FETCHED.findall(text)]


def check(app, exception):
    """Fails the build over a page or a style that fetches something."""
    from sphinx.errors import SphinxError

    if exception or app.builder.format != "html":
        return
    root = Path(app.outdir)
    for path in [*root.rglob("*.html"), *root.rglob("*.css")]:
        if found := fetched(path.read_text(encoding="utf-8")):
            raise SphinxError(
                f"{path.relative_to(root)} fetches {', '.join(found)}; pages need nothing from elsewhere."
            )


def setup(app):
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
