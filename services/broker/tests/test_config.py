"""The command line and the [broker] section."""

import json

import pytest
from redis_process import free_port

from quartet_broker.__main__ import preflight
from quartet_broker.config import BrokerSection
from quartet_common.cli import service_main


def run(*arguments: str) -> int:
    return service_main("broker", BrokerSection, preflight, serve=None, argv=["--dry-run", *arguments])


def test_a_dry_run_says_what_would_run_without_the_password(redis_server, capsys):
    url = redis_server.url.replace("redis://", "redis://user:secret@")
    code = run("--set", f"broker.redis_url={url}")
    captured = capsys.readouterr()
    # This Redis has no password: it refuses one, or takes any; neither is shown.
    assert code in (0, 2) and "secret" not in captured.out + captured.err


def test_a_dry_run_names_redis_and_its_version(redis_server, capsys):
    assert run("--set", f"broker.redis_url={redis_server.url}") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["redis"] == redis_server.url and plan["redis_version"]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (f"redis_url=redis://127.0.0.1:{free_port()}/0", "start it, or set broker.redis_url"),
        ("redis_url=http://127.0.0.1:1", "must begin with one of redis://"),
        ("redis_ulr=x", "did you mean 'redis_url'"),
        ("sweep_interval=0", "broker.sweep_interval"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_status_2(setting, sentence, capsys):
    assert run("--set", f"broker.{setting}") == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
