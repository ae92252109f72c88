"""Every link has a target; the index names every page."""

import re
from urllib.parse import urlsplit

import pytest
from pages import PAGES, ROOT, Link, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_are_there(page):
    assert not [f"{link}: {wrong}" for link in links(page) if (wrong := what_is_wrong(link))]


def what_is_wrong(link: Link) -> str:
    """Return why a link is broken; "" if it is not. Of external ones only the form is checked."""
    url = urlsplit(link.target)
    if url.scheme:
        return "" if re.fullmatch(r"https://[\w.-]+\.[a-z]{2,}(/\S*)?", link.target) else "no https address"
    target = (link.page.parent / url.path).resolve() if url.path else link.page
    if not target.is_relative_to(ROOT) or not target.exists():
        return "there is no such file in the checkout"
    if url.fragment and (target.suffix != ".md" or url.fragment not in anchors(target)):
        return f"there is no heading '{url.fragment}'"
    return ""


def test_the_index_names_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / urlsplit(link.target).path).resolve() for link in links(index)}
    assert not [name_of(page) for page in PAGES if page != index and page not in linked]
