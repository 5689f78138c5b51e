"""Links of the Markdown files in this repository as links of these pages: to README, CONTRIBUTING, benchmarks, sources."""

import re

BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\]\((?:\.\./)+([A-Za-z.]+\.md)(#[\w-]*)?\)")


def inside(app, docname, source):
    source[0] = LINK.sub(lambda m: f"](/{BESIDE.get(m[1], m[1])}{m[2] or ''})" if m[1] in BESIDE else m[0], source[0])


def setup(app):
    app.connect("source-read", inside, priority=400)
    return {"parallel_read_safe": True}
