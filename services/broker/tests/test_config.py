"""The command line and the [broker] section."""

import json

import pytest
from conftest import on_both
from redis_process import RedisProcess, free_port

from quartet_broker.config import BrokerSection, parse, without_password
from quartet_broker.preflight import preflight
from quartet_server.cli import service_main


def run(*arguments: str) -> int:
    return service_main("broker", BrokerSection, preflight, serve=None, argv=["--dry-run", *arguments])


@on_both
def test_a_dry_run_names_redis_without_the_password_and_warns_where_it_may_evict_experience(redis_server, capsys):
    with redis_server.client() as client:
        client.config_set("maxmemory", 1 << 30)
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert run("--set", f"broker.redis_url={redis_server.url}") == 0
        finally:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 0)
    output, warned = capsys.readouterr()
    assert "may evict experience: set maxmemory-policy noeviction, not allkeys-lru" in warned
    assert "SECRET" not in output + warned
    plan = json.loads(output)
    assert plan["redis"] == redis_server.url.replace("SECRET", "***")
    assert plan["redis_version"].startswith(("6.", "7.", "8.", "valkey "))


def test_a_wrong_password_is_not_shown_either(redis_server, capsys):
    assert run("--set", f"broker.redis_url={redis_server.url.replace('SECRET', 'hunter2')}") == 2
    captured = capsys.readouterr()
    assert "quartet:***@" in captured.err and "hunter2" not in captured.out + captured.err


def test_a_replica_is_a_warning(redis_server, tmp_path, capsys):
    replica = RedisProcess(tmp_path, "--replicaof", "127.0.0.1", str(redis_server.port))
    replica.start()
    try:
        assert run("--set", f"broker.redis_url={replica.url}") == 0
    finally:
        replica.kill()
    assert "is a replica, which refuses writes: name its master" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@host:1/0",
        "rediss+cluster://user:secret@a:1,b:2?ssl_ca_certs=ca.pem",
        "redis+sentinel://user:secret@a:1,b/service/1?sentinel_password=secret&sentinel_username=sam",
        "unix://user:secret@/run/redis.sock?db=1",
    ],
)
def test_no_form_of_url_shows_its_password(url):
    section = BrokerSection(redis_url=url)
    assert "secret" in section.redis_url
    for shown in (without_password(url), section.model_dump_json()):
        assert "secret" not in shown and "***" in shown
    assert without_password(url).replace("***", "secret") == url


def test_what_the_urls_of_several_servers_say():
    url = parse("rediss+sentinel://u:p%40ss@one:1,two,[::1]:3/main/4?ssl_ca_certs=ca.pem&sentinel_password=s")
    assert (url.form, url.service) == ("sentinel", "main")
    assert url.addresses == (("one", 1), ("two", 26379), ("::1", 3))
    assert (url.options["username"], url.options["password"], url.options["db"]) == ("u", "p@ss", 4)
    assert url.options["ssl_ca_certs"] == url.sentinel_options["ssl_ca_certs"] == "ca.pem"
    assert url.sentinel_options["password"] == "s" and "username" not in url.sentinel_options
    cluster = parse("redis+cluster://one,two:7001")
    assert (cluster.form, cluster.addresses) == ("cluster", (("one", 6379), ("two", 7001)))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (f"redis_url=redis://127.0.0.1:{free_port()}/0", "start it, or set broker.redis_url"),
        ("redis_url=http://127.0.0.1:1", "must begin with one of redis://"),
        ("redis_url=redis://u:secret@one:1,two:2/0", "for several use redis+sentinel:// or redis+cluster://"),
        ("redis_url=redis+sentinel://one:1,two:2", "name the master after the Sentinels' addresses"),
        (f"redis_url=redis+cluster://127.0.0.1:{free_port()}", "no node of the Cluster says where the slots are"),
        (f"redis_url=redis+sentinel://127.0.0.1:{free_port()}/main", "no Sentinel names the master of 'main'"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_status_2(setting, sentence, capsys):
    assert run("--set", f"broker.{setting}") == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and "secret" not in error
