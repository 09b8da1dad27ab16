"""Pages as a parser reads them: every element closed, every link led somewhere, nothing fetched."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "link", "meta"}
RAW = {"script", "style"}
ADDRESSES = {"src", "href", "action", "data", "poster", "srcset", "xlink:href"}


@dataclass
class Found:
    """What is in a page.

    Attributes:
      tags: all elements, as name and attributes.
      text: all text but that of scripts and styles.
      ids, links: of elements, and to them.
      data: of the script of JSON.
    """

    tags: list = field(default_factory=list)
    text: str = ""
    ids: list = field(default_factory=list)
    links: list = field(default_factory=list)
    data: object = None

    def all(self, name, **attributes):
        """Attributes of all elements of a name that have these attributes."""
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [a for n, a in self.tags if n == name and wanted.items() <= a.items()]


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.found = Found()
        self.raw = ""

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"<{tag}>: an attribute twice, {names}"
        values = dict(attributes)
        self.found.tags.append((tag, values))
        assert not any(name.startswith("on") for name in names), f"<{tag}> {names}"
        if "id" in values:
            self.found.ids.append(values["id"])
        for name in ADDRESSES & set(names):
            assert values[name].startswith("#"), f"<{tag} {name}={values[name]!r}>"
            self.found.links.append(values[name][1:])
        if tag not in VOID:
            self.open.append(tag)
        self.raw = ""

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> of nothing"
        opened = self.open.pop()
        assert opened == tag, f"</{tag}> in <{opened}>"
        if (
            tag == "script"
            and ("script", {"type": "application/json", "class": "data"}) in (self.found.tags[-1:])
        ):
            self.found.data = json.loads(self.raw)

    def handle_data(self, text):
        if self.open and self.open[-1] in RAW:
            self.raw += text
        else:
            self.found.text += text


def parsed(html):
    """What is in a page, or in a part of one.

    Raises:
      AssertionError: it is not well formed, or asks for something.
    """
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    found = parser.found
    assert len(found.ids) == len(set(found.ids)), "an id twice"
    assert set(found.links) <= set(found.ids), set(found.links) - set(found.ids)
    styles = html.split("<style>")[1:]
    assert not any("url(" in s.split("</style>")[0] or "@import" in s for s in styles)
    return found
