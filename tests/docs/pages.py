"""README.md, CONTRIBUTING.md and docs/*.md as the tests see them: their anchors, links, code blocks and names."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
MADE = {ROOT / "docs" / name for name in ("run-file.md", "protos.md", "commands.md")}
"""Pages that docs/tools/write.py makes of what is checked where it is declared."""
WRITTEN = tuple(page for page in PAGES if page not in MADE)

_MARK = re.compile(r"<!-- (run|not run): (.+) -->\n$")


@dataclass(frozen=True)
class Block:
    """A code block."""

    page: Path
    line: int
    """Of its opening fence, from 1."""
    fenced: bool
    info: str
    text: str
    mark: str
    """"run", "not run", or "" where there is none."""
    says: str
    """What the mark says: where it is run, or why not."""

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


@dataclass(frozen=True)
class Link:
    """A link or an image."""

    page: Path
    target: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {self.target}"


def name_of(page: Path) -> str:
    """The page as a person names it."""
    return str(page.relative_to(ROOT))


@cache
def tokens(page: Path) -> list[Token]:
    """The page, parsed as GitHub does, tables included."""
    return MarkdownIt().enable("table").parse(page.read_text())


def blocks(page: Path) -> list[Block]:
    """Its code blocks, those in lists included. A mark is an HTML comment right before the fence."""
    found, mark = [], None
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            line = token.map[0] + 1 if token.map else 0
            kind, says = mark.groups() if mark else ("", "")
            found.append(Block(page, line, token.type == "fence", token.info.strip(), token.content, kind, says))
        mark = _MARK.fullmatch(token.content) if token.type == "html_block" else None
    return found


def links(page: Path) -> list[Link]:
    """Its links and images."""
    inline = [child for token in tokens(page) for child in token.children or ()]
    targets = [str(one.attrGet("href") or one.attrGet("src") or "") for one in inline if one.type in _LINKS]
    return [Link(page, target) for target in targets]


_LINKS = ("link_open", "image")


def code_spans(page: Path) -> list[str]:
    """What stands in code font within its text."""
    return [child.content for token in tokens(page) for child in token.children or () if child.type == "code_inline"]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives its headings."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    stream = tokens(page)
    for index, token in enumerate(stream):
        if token.type == "heading_open":
            text = "".join(child.content for child in stream[index + 1].children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return frozenset(found)
