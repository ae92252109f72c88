"""docs/troubleshooting.md has an entry for every message that does not say what to do, and no other entry."""

import re
from functools import cache

from messages import PACKAGES, letters, messages
from pages import ROOT, tokens

PAGE = ROOT / "docs" / "troubleshooting.md"
SECTIONS = {
    "Every service": tuple(PACKAGES),
    "The broker": ("broker",),
    "The reward service": ("reward",),
    "The environment service": ("environment",),
    "The rollout": ("rollout",),
    "The trainer": ("trainer",),
    "The client": ("client",),
    "The launcher": ("launcher",),
}


@cache
def entries() -> list[tuple[str, str]]:
    """Return (section, pattern) of every message in the first column of the page's tables."""
    found, section, stream = [], "", tokens(PAGE)
    for index, token in enumerate(stream):
        if token.type == "heading_open" and token.tag == "h2":
            section = "".join(child.content for child in stream[index + 1].children)
        if token.type == "tr_open" and stream[index + 1].type == "td_open":
            cell = stream[index + 2]
            spans = [child.content for child in cell.children if child.type == "code_inline"]
            found += [(section, span.replace("\\|", "|")) for span in spans]
    return [(section, pattern) for section, pattern in found if section in SECTIONS]


def matches(pattern: str, template: str) -> bool:
    return bool(re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), template, re.DOTALL))


def test_every_message_that_does_not_name_its_cure_has_an_entry():
    missing = [
        str(message)
        for message in messages()
        if not message.names_its_cure
        and not any(
            message.package in SECTIONS[section] and matches(pattern, message.template)
            for section, pattern in entries()
        )
    ]
    assert not missing, f"{len(missing)} messages without an entry in {PAGE.name}:\n" + "\n".join(missing)


def test_every_entry_is_of_a_message_that_there_is():
    found = messages()
    stale = [
        f"{section}: {pattern}"
        for section, pattern in entries()
        if not any(message.package in SECTIONS[section] and matches(pattern, message.template) for message in found)
    ]
    assert not stale


def test_entries_are_not_so_wide_that_they_match_anything():
    wide = [pattern for _, pattern in entries() if letters(pattern) < 4]
    assert not wide
    assert sum(not message.names_its_cure for message in messages()) > 300
