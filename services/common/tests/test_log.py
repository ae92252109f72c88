"""Logs as they come out of a process: JSON lines that carry the ids of what they are about, and text for people."""

import json
import logging
import re
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from quartet_common.log import configure_logging, get_logger

TALK = """
import sys
from datetime import datetime, timedelta
from quartet_common import log, tracing
from quartet_common.config import TracingSection

log.configure_logging("rollout", "host-1", sys.argv[1], "info", "demo")
logger = log.get_logger("quartet_rollout.groups")
logger.info("ready")
with log.log_fields(group="pass-0/17", version=3):
    logger.info("prompt given back: %s", "no room", extra={"attempt": 2})
    logger.info("of another run", extra={"run": "other", "version": 4})
try:
    with log.log_fields(step=1):
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
logger.debug("not said")
log.set_run("next")
logger.info("of the next run")
log.set_run("")
logger.info("of none")
log.set_run("demo")
tracing.configure("rollout", "host-1", TracingSection(endpoint="127.0.0.1:9"))
with tracing.span("rollout", root=True) as span:
    logger.error("traced %s", span.traceparent)
tracing._active = None  # the collector is not there: send nothing
"""


def said(form: str) -> list[str]:
    command = [sys.executable, "-c", TALK, form]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr.splitlines()


def test_json_lines_carry_the_ids_of_what_they_are_about():
    ready, given_back, other, of_next, of_none, traced = map(json.loads, said("json"))
    who = {"service": "rollout", "instance": "host-1", "logger": "quartet_rollout.groups"}
    assert datetime.fromisoformat(ready["time"]).utcoffset() == timedelta(0)
    assert ready == who | {"time": ready["time"], "level": "INFO", "message": "ready", "run": "demo"}
    about = {"run": "demo", "group": "pass-0/17", "version": 3, "attempt": 2}
    assert given_back.items() >= (who | about | {"message": "prompt given back: no room"}).items()
    assert other.items() >= {"run": "other", "group": "pass-0/17", "version": 4}.items(), "the line's own come first"
    assert of_next["run"] == "next" and "run" not in of_none and not of_next.keys() & {"group", "version", "step"}
    assert traced["trace"] == traced["message"].split("-")[1] and "group" not in traced


def test_of_a_warning_that_comes_again_one_line_is_written(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging("rollout", "host-1")
    for n in range(400):
        get_logger("here").warning("group %d failed", n)
        get_logger("here").error("an error is always written: %d", n)
    get_logger("there").warning("group 1 failed")
    for caller in ("a", "b"):
        get_logger("here").warning("group 1 failed", extra={"caller": caller, "repeated": 0})
    lines = capsys.readouterr().err.splitlines()
    assert sum("WARNING group" in line for line in lines) == 4 and len(lines) == 404


HOSTILE = """
import logging, sys
from quartet_common import log
log.configure_logging("rollout", "host-1", sys.argv[1])
evil = "\\x1b[2J\\x9b1A\\u202e\\ud800\\n12:30:01 broker INFO forged"
logging.getLogger("here").warning("a program said %s", evil, extra={"group": evil})
try:
    raise ValueError(evil)
except ValueError:
    logging.getLogger("here").exception("it failed", stack_info=True)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_value_can_neither_forge_a_line_nor_steer_a_terminal(form):
    done = subprocess.run([sys.executable, "-c", HOSTILE, form], capture_output=True, timeout=60, check=True)
    text = done.stderr.decode()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    heads = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(heads) == 2 and all("forged" not in line[:30] for line in heads)
    assert r"\u001b[2J\u009b1A\u202e\ud800\n12:30:01" in heads[0]
