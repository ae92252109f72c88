"""The rights of the Redis user: the list is what is called and what the docs grant, and each that lacks is named."""

import re
from pathlib import Path

import pytest
from conftest import documented_user, on_both

import quartet_broker
from quartet_broker import rights
from quartet_broker.config import BrokerSection
from quartet_broker.preflight import preflight
from quartet_server.cli import service_main

SOURCE = Path(quartet_broker.__file__).parent
METHODS = {"ping", "info", "dbsize", "time", "psubscribe"}
"""Methods of redis-py's clients that are called by name."""
COMMANDS = {*rights.COMMANDS, rights.WITH_REPLICAS, rights.IN_A_CLUSTER, *rights.FOR_BACKUPS}
WORDS = {rights.word(command) for command in COMMANDS} | {f"+{name.lower()}" for name in rights.TRANSACTION}


def called() -> set[str]:
    """The commands that the scripts, and the other modules of the broker, name."""
    lua = "".join(path.read_text() for path in SOURCE.rglob("*.lua"))
    found = set(re.findall(r"\bcall(?:_many)?\('([A-Z]+)'", lua)) | set(re.findall(r"'(Z(?:REV)?RANGE)'", lua))
    for path in SOURCE.glob("*.py"):
        if path.name != "rights.py":
            text = path.read_text()
            found |= set(re.findall(r"\(\s*\"([A-Z]{3,})\",", text))
            found |= {name.upper() for name in METHODS if re.search(rf"\b\w+\.{name}\(", text)}
            found |= {"SCRIPT"} if ".script_load(" in text else set()
    return found - {"READONLY"}  # an error


def test_the_list_has_what_is_called():
    # redis-py calls these of itself: an end of a subscription, the discovery of a Cluster.
    assert called() | {"PUNSUBSCRIBE", "CLUSTER", "DISCARD"} == {
        *(str(command[0]) for command in COMMANDS), *rights.TRANSACTION
    }  # fmt: skip


def test_the_docs_grant_what_the_list_has():
    rules = documented_user()
    assert {rule for rule in rules if rule.startswith("+")} == WORDS
    assert {"~q:*", "&q:*:bell"} <= set(rules)


def dry_run(url: str) -> int:
    return service_main(
        "broker", BrokerSection, preflight, serve=None, argv=["--dry-run", "--set", f"broker.redis_url={url}"]
    )


@pytest.fixture
def poor(redis_server):
    """Sets the rules of a user, from none; returns the broker's URL."""

    def make(*rules: str, name: str = "poor") -> str:
        with redis_server.client() as client:
            client.execute_command("ACL", "SETUSER", name, "reset", "on", ">poor", *rules)
        return redis_server.url.replace("quartet:SECRET", f"{name}:poor")

    yield make
    with redis_server.client() as client:
        client.execute_command("ACL", "DELUSER", "poor")


@on_both
def test_each_right_that_is_missing_is_named_with_the_rule_that_adds_it(poor, capsys):
    rules = documented_user()[3:]
    optional = {rights.word(command) for command in (rights.WITH_REPLICAS, rights.IN_A_CLUSTER, *rights.FOR_BACKUPS)}
    for word in WORDS - optional:
        url = poor(*(rule for rule in rules if rule != word))
        assert dry_run(url) == 2, word
        (line,) = capsys.readouterr().err.splitlines()
        granted = re.search(r"ACL SETUSER poor (.+) \(docs/redis.md\)", line)
        assert granted is not None and word in granted[1].split(), line
        assert granted[1] in (word, "+multi +exec +discard"), line


@on_both
def test_the_rules_that_are_named_cure_it(redis_server, poor, capsys):
    url = poor("-@all", "+multi", "+exec", "+discard", "+info", "resetkeys", "resetchannels")
    for _ in range(3):
        if dry_run(url) == 0:
            break
        line = capsys.readouterr().err
        cure = re.search(r"ACL SETUSER poor (.+) \(docs/redis.md\)", line)
        assert cure is not None, line
        with redis_server.client() as client:
            client.execute_command("ACL", "SETUSER", "poor", *cure[1].split())
    else:
        pytest.fail("still refused")
    warned = capsys.readouterr().err
    assert "+dump +restore" in warned and "only quartet backup needs them" in warned


@on_both
@pytest.mark.parametrize(
    ("rules", "word"),
    [
        (("~q:{*", "&q:*:bell"), "~q:*"),  # not q:runs
        (("~q:runs", "&q:*:bell"), "~q:*"),
        (("~q:*", "&q:a:bell"), "&q:*:bell"),
        (("~q:*",), "&q:*:bell"),
        ((), "&q:*:bell ~q:*"),
    ],
)
def test_keys_and_channels_that_are_missing_are_named(poor, rules, word, capsys):
    url = poor(*(rule for rule in documented_user()[3:] if rule[0] not in "~&"), *rules)
    assert dry_run(url) == 2
    assert f"ACL SETUSER poor {word} (docs/redis.md)" in capsys.readouterr().err


def test_a_database_other_than_the_first_needs_select(poor, capsys):
    url = poor(*documented_user()[3:])
    assert dry_run(re.sub("/0$", "/1", url)) == 2
    assert "ACL SETUSER poor +select (docs/redis.md)" in capsys.readouterr().err


@on_both
def test_the_check_changes_nothing(redis_server, poor):
    poor(*documented_user()[3:])
    with redis_server.client() as client:
        before = client.dbsize(), client.info("commandstats").get("cmdstat_xadd")
        assert dry_run(redis_server.url) == 0
        assert (client.dbsize(), client.info("commandstats").get("cmdstat_xadd")) == before
