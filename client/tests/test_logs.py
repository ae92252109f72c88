"""`quartet logs`: lines of several services in the order of their times, filtered, followed."""

import json
import signal
import subprocess
import sys
from datetime import datetime

import pytest

from quartet_client.cli.main import main


def line(at: float, service: str, message: str, level: str = "INFO", **fields) -> str:
    told = datetime.fromtimestamp(1_760_000_000 + at)
    time = f"{told:%Y-%m-%d %H:%M:%S},{told.microsecond // 1000:03}"
    return json.dumps({"time": time, "level": level, "logger": "x", "message": message, "service": service} | fields)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    texts = {
        "broker": [line(1, "broker", "run made", run="demo"), line(4, "broker", "leases expired", run="demo", count=2)],
        "rollout": [
            line(2, "rollout", "engine loaded"),
            line(3, "rollout", "prompt given back: no room", "WARNING", group="pass-0/17", version=3, attempt=1),
            line(5, "rollout", "a group failed", "ERROR", group="pass-0/9", exc_info="Traceback:\n  ZeroDivisionError"),
            "a line of a library",
        ],
        "redis": ["1:C 22 Nov 2026 08:45:48.404 # Redis is starting"],
    }
    for name, lines in texts.items():
        (tmp_path / "logs" / f"{name}.log").write_text("".join(f"{each}\n" for each in lines))
    return tmp_path


@pytest.fixture
def logs(folder, capsys):
    def _logs(*options: str) -> list[str]:
        assert main(["logs", str(folder), *options]) == 0
        return capsys.readouterr().out.splitlines()

    return _logs


def messages(lines: list[str]) -> list[str]:
    return [json.loads(each)["message"] for each in lines if each.startswith("{")]


def test_the_services_lines_are_merged_by_time(logs):
    merged = ["run made", "engine loaded", "prompt given back: no room", "leases expired", "a group failed"]
    raw = logs("--json")
    assert messages(raw) == merged
    assert raw[0].endswith("Redis is starting"), "what has no time comes first in its file"
    assert raw[-1] == "a line of a library", "or right after the line before it"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--service", "broker"), ["run made", "leases expired"]),
        (("--level", "error"), ["a group failed"]),
        (("--group", "pass-0/17"), ["prompt given back: no room"]),
        (("--text", "LEASES"), ["leases expired"]),
    ],
)
def test_filters_leave_out_the_rest(logs, options, expected):
    assert messages(logs("--json", *options)) == expected


def test_followed_lines_come_whole_and_ctrl_c_ends_it(folder):
    command = [sys.executable, "-m", "quartet_client", "logs", str(folder), "--json", "-n", "1", "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout.readline() == "a line of a library\n"
        half, rest = line(9, "broker", "said in two writes")[:30], line(9, "broker", "said in two writes")[30:]
        with (folder / "logs" / "broker.log").open("a") as file:
            file.write(half)
            file.flush()
            with (folder / "logs" / "rollout.log").open("a") as other:
                other.write(line(8, "rollout", "meanwhile") + "\n")
            assert json.loads(process.stdout.readline())["message"] == "meanwhile"
            file.write(rest + "\n")
        assert json.loads(process.stdout.readline())["message"] == "said in two writes"
        (folder / "logs" / "trainer.log").write_text(line(9, "trainer", "started later") + "\n")
        assert json.loads(process.stdout.readline())["message"] == "started later"
        # A service that is started again may begin its log anew.
        (folder / "logs" / "broker.log").write_text(line(10, "broker", "anew") + "\n")
        assert json.loads(process.stdout.readline())["message"] == "anew"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
