"""A list of pages as cards, each under the first picture of its page: the directive `cards` around a Markdown list."""

import re
from posixpath import dirname, join, normpath

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ITEM = re.compile(r"^- \[[^\]]*\]\(([\w/.-]+)\.md\)", re.MULTILINE)


class Cards(SphinxDirective):
    """Takes a list, and nothing else, whose items begin with a link to a page."""

    has_content = True

    def run(self):
        cards = nodes.container(classes=["cards"])
        self.state.nested_parse(self.content, self.content_offset, cards)
        pages = ITEM.findall("\n".join(self.content))
        for item, page in zip(cards.findall(nodes.list_item), pages, strict=True):
            item["page"] = normpath(join(dirname(self.env.docname), page))
        self.env.note_reread()  # the pictures are of other pages
        return [cards]


def draw(app, doctree, docname):
    """Puts the pictures in, which are known when all pages have been read."""
    for item in doctree.findall(nodes.list_item):
        if "page" not in item:
            continue
        picture = next(app.env.get_doctree(item["page"]).findall(nodes.image), None)
        if picture is not None:
            link = nodes.reference("", "", internal=True, refuri=app.builder.get_relative_uri(docname, item["page"]))
            link += nodes.image(uri=picture["uri"], candidates=dict(picture["candidates"]), alt="")
            item.insert(0, nodes.paragraph("", "", link))


def setup(app):
    app.add_directive("cards", Cards)
    app.connect("doctree-resolved", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
