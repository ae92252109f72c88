"""One supervised process: its end, its last words, and the embedded Redis."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from quartet_local.process import Process, RedisProcess, exit_reason, find_server, socket_folder

pytestmark = pytest.mark.timeout(120)
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); signal.pause()"
NEVER = 10_000.0


@pytest.mark.parametrize(("grace", "hurried"), [(NEVER, True), (0.2, False)], ids=["hurried", "after its grace"])
def test_one_that_does_not_drain_is_killed(tmp_path, grace, hurried):
    async def body():
        process = Process("deaf", [sys.executable, "-c", DEAF], tmp_path / "deaf.log")
        process.start()
        while "deaf" not in (tmp_path / "deaf.log").read_text():
            await asyncio.sleep(0.01)
        hurry = asyncio.Event()
        if hurried:
            asyncio.get_running_loop().call_later(0.05, hurry.set)
        await process.stop(grace, hurry)
        assert await process.wait() == 128 + signal.SIGKILL

    asyncio.run(asyncio.wait_for(body(), 60))


def test_every_exit_status_has_words():
    words = {status: exit_reason(status) for status in range(256)}
    assert words[3] == "ended with status 3" and words[255] == "ended with status 255"
    assert words[128 + signal.SIGKILL] == "was killed by SIGKILL"


def test_last_words_that_are_no_json_are_shown_as_they_are(tmp_path):
    (tmp_path / "log").write_text('{"message": "an error", "level": "ERROR"}\n{"a": ' + "[" * 5000 + "\n")
    assert Process("any", [], tmp_path / "log").last_words() == "an error"


def test_last_words_are_those_of_the_present_start(tmp_path):
    log = tmp_path / "log"
    log.write_text('{"message": "an error of before", "level": "ERROR"}\n')

    async def body():
        process = Process("brief", [sys.executable, "-c", "print('all is well')"], log)
        process.start()
        assert await process.wait() == 0
        assert process.last_words() == "all is well"
        log.write_text("after logrotate's copytruncate\n")
        assert process.last_words() == "after logrotate's copytruncate"

    asyncio.run(asyncio.wait_for(body(), 60))


def test_the_embedded_redis_has_a_share_of_the_memory_and_refuses_more(tmp_path):
    async def body():
        with tempfile.TemporaryDirectory() as sockets:
            process = RedisProcess(
                find_server(), tmp_path / "redis", tmp_path / "log", Path(sockets), memory_share=0.25
            )
            process.start()
            await process.until_answers()
            reader, writer = await asyncio.open_unix_connection(process.url.removeprefix("unix://"))
            settings = {}
            for name in ("maxmemory", "maxmemory-policy"):
                writer.write(f"CONFIG GET {name}\r\n".encode())
                *_, settings[name] = [(await reader.readline()).strip().decode() for _ in range(5)]
            writer.close()
            await process.stop(10, asyncio.Event())
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert settings == {"maxmemory": str(memory // 4), "maxmemory-policy": "noeviction"}

    asyncio.run(asyncio.wait_for(body(), 60))


def test_the_socket_folder_of_a_launcher_that_was_killed_is_removed_by_the_next(tmp_path):
    with socket_folder(tmp_path) as killed:
        pass
    killed.mkdir()
    (killed / "redis.sock").touch()
    (tmp_path / "sockets").symlink_to(killed)
    with socket_folder(tmp_path) as sockets:
        assert not killed.exists() and sockets.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "sockets").resolve() == sockets.resolve()
    assert not sockets.exists() and list(tmp_path.iterdir()) == []


def test_a_socket_s_path_fits_into_its_address_however_long_that_of_temporary_files_is(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    Path(tempfile.tempdir).mkdir()
    with socket_folder(tmp_path) as sockets, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sockets / "redis.sock"))


def test_a_copy_of_a_run_folder_leaves_the_sockets_of_the_run_alone(tmp_path):
    (tmp_path / "run").mkdir()
    with socket_folder(tmp_path / "run") as sockets:
        shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
        with socket_folder(tmp_path / "copy") as others:
            assert sockets.is_dir() and others != sockets


HANGS = """
import asyncio, faulthandler, os, sys, time
from quartet_server.process import SystemdNotifier
faulthandler.enable()

async def main():
    supervisor = SystemdNotifier()
    supervisor.notify(READY=1)
    feeding = asyncio.create_task(supervisor.feed_watchdog())
    await asyncio.sleep(1.5)  # longer than the launcher waits: it is fed
    def plug_in():
        print(os.getpid(), flush=True)
        if sys.argv[1] == "blocks":
            time.sleep(600)
    plug_in()
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["blocks", "stops"])
def test_a_service_whose_event_loop_does_not_run_is_killed_and_its_log_says_where_it_hung(tmp_path, how):
    async def body():
        log = tmp_path / "log"
        process = Process("reward", [sys.executable, "-c", HANGS, how], log, hang_seconds=1.0)
        for _ in range(2):  # a second start is watched like the first
            process.start()
            await process.answers_calls.wait()
            if how == "stops":
                while not log.read_text().strip().isdigit():
                    await asyncio.sleep(0.01)
                os.kill(int(log.read_text()), signal.SIGSTOP)
            assert await process.wait() == 128 + signal.SIGABRT
            assert process.hung == "did not respond for 1 s (launcher.hang_seconds)"
            assert ("in plug_in" if how == "blocks" else "in select") in log.read_text()
            log.write_text("")

    asyncio.run(asyncio.wait_for(body(), 60))
