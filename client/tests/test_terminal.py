"""What others wrote, shown at a terminal: it can neither steer it nor forge a line, whatever the command."""

import json
import os
import re
import sys
import threading
import tty
from contextlib import suppress

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message import Message
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2
from real_broker import echo, life_of

from quartet_client import connection
from quartet_client.__main__ import main as entry
from quartet_client.cli import main as command_line
from quartet_client.cli.main import cli, main
from quartet_common.text import block, one_line, visible
from quartet_contract.world import instance, rollout

# Clipboard, title, clear, conceal, C1's CSI, next line, direction, line separator, delete.
SEQUENCES = "\x1b]52;c;ZXZpbA==\x1b\\\x1b]0;title\x1b\\\x1b[2J\x1b[8m\x9b1A\x85\u202e\u2028\x7f"
LINE = SEQUENCES + "\nforged"
BLOCK = SEQUENCES + "\nsecond line"
BLOCKS = {
    ("CompletionInfo", "text"),
    ("Prompt", "text"),
    ("GroupTranscript", "prompt_text"),
    ("Message", "content"),
    ("Notice", "text"),
}
KEYS = ("run_id", "event_id", "evaluation_id", "level")  # by which the client decides what to show
SERIALIZED = {"transcript": experience_pb2.GroupTranscript, "unscored": experience_pb2.UnscoredGroup}
OWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[hl]|1?[AG]|2K|H)")  # rich: styles, and its live picture
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e]")
FORGED = re.compile(r"^[\s│]*forged", re.MULTILINE)


def poison(message: Message) -> Message:
    """Append hostile text to every string of an answer, and to the keys of its gauges and metrics."""
    for field, value in list(message.ListFields()):
        entry = field.message_type if field.message_type and field.message_type.GetOptions().map_entry else None
        if entry and entry.fields_by_name["value"].type == FieldDescriptor.TYPE_DOUBLE:
            value[LINE] = 1.0
        elif field.message_type and not entry:
            for each in value if field.is_repeated else [value]:
                poison(each)
        elif field.name in SERIALIZED and value:
            setattr(message, field.name, poison(SERIALIZED[field.name].FromString(value)).SerializeToString())
        elif field.type == FieldDescriptor.TYPE_STRING and field.name not in KEYS:
            text = BLOCK if (message.DESCRIPTOR.name, field.name) in BLOCKS else LINE
            if field.is_repeated:
                value[:] = [each + text for each in value]
            else:
                setattr(message, field.name, value + text)
    return message


class PoisonedChannel:
    """A channel to a service whose answers come poisoned; ids that were, it gets as it knows them."""

    def __init__(self, channel):
        self._channel = channel

    def __getattr__(self, name: str):
        made = getattr(self._channel, name)
        if not name.startswith("unary_"):
            return made

        def poisoned(path, request_serializer, response_deserializer, **options):
            def known(request: Message) -> bytes:
                text = re.sub(rf"(?<=\w){re.escape(json.dumps(LINE)[1:-1])}", "", MessageToJson(request))
                return request_serializer(Parse(text, type(request)()))

            return made(path, known, lambda answer: poison(response_deserializer(answer)), **options)

        return poisoned


@pytest.fixture(scope="module")
def hostile(running_broker, reward_and_rollout, tmp_path_factory):
    """Services with hostile text in every string of their answers; run "demo" has failed."""
    running_broker.forget_all_runs()
    run_file = tmp_path_factory.mktemp("hostile") / "run.toml"
    run_file.write_text("[run]\nid = 'demo'\n")
    life = life_of(running_broker.address, run_file)
    done = echo(instance("poison"))
    unscored = experience_pb2.UnscoredGroup(group={"transcript": done.SerializeToString()}).SerializeToString()
    life.dead("poison", unscored)
    asked = instance("answer", "5")
    asked.prompt.metadata["note"] = LINE
    life.call("SubmitPrompts", pb.SubmitPromptsRequest(run_id="demo", instances=[asked]))
    life.answer()
    life.call("RegisterMember", pb.RegisterMemberRequest(run_id="demo", member=rollout("r2", waiting_for="w")))
    life.report(step=pb.StepFinished(step=0, policy_version=1, metrics={"reward/mean": 0.5}))
    life.report(evaluation=pb.EvaluationFinished(evaluation_set="held", metrics={"eval/held/a": 1.0}))
    life.report(notice=pb.Notice(level="error", text="note"))
    life.finish(pb.RUN_STATE_FAILED)
    with pytest.MonkeyPatch.context() as patch:
        connect = connection.connect
        patch.setattr(connection, "connect", lambda *to, **options: PoisonedChannel(connect(*to, **options)))
        yield {"broker": running_broker.address, **reward_and_rollout}


@pytest.fixture
def quartet(hostile, monkeypatch):
    """Run `quartet` in this process on a terminal of its own; return the exit status and what the terminal was sent."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "250", "LINES": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    sets = [f'--set=addresses.{kind}="{address}"' for kind, address in hostile.items()]

    def run(*arguments: str) -> tuple[int, str]:
        master, slave = os.openpty()
        tty.setraw(slave)
        sent = bytearray()

        def read() -> None:
            with suppress(OSError):  # the other side is closed
                while data := os.read(master, 65536):
                    sent.extend(data)

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(slave, "w", encoding="utf-8") as screen, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            patch.setattr(sys, "stderr", screen)
            status = main([*arguments, *(sets if arguments[0] not in WITHOUT_SERVICES else ())])
        reader.join(30)
        os.close(master)
        return status, sent.decode()

    return run


WITHOUT_SERVICES = (
    "certs",
    "compare",
    "contract-test",
    "env",
    "export",
    "init",
    "migrate-colossalchat",
    "plot",
    "sweep",
)
DEAD = f"poison{LINE}"
# What each command is given to show: a file, an argument or an answer with hostile text.
COMMANDS = {
    "init": [[LINE, "--data", "FOLDER/broken.jsonl"], [f"FOLDER/{LINE}"]],
    "run": [
        ["FOLDER/run.toml", "--attach"],
        ["FOLDER/run.toml", "--attach", "--dry-run", "--set", f"run.labels.a={LINE}"],
    ],
    "sft": [["FOLDER/run.toml", "--set", f"sft.long_rows={LINE}"]],
    "sweep": [["FOLDER/run.toml", "--set", f"run.labels.a={LINE},{LINE}"]],
    "submit": [["FOLDER/p.jsonl", "--run", LINE], ["FOLDER/broken.jsonl"]],
    "generate": [["hi"], ["hi", "--json"]],
    "score": [
        *(["5", "--answer", "5"], ["5"], ["5", "--json"]),
        *(
            ["FOLDER/run.toml", "--attach", "--completion", "5"],
            ["FOLDER/run.toml", "--attach", "--completion", LINE, "--json"],
        ),
    ],
    "status": [[], ["--json"]],
    "watch": [["demo"], ["demo", "--plain"], [LINE]],
    "env": [[LINE]],
    "trace": [[f"answer{LINE}", "--run", "demo"], [f"answer{LINE}", "--run", "demo", "--json"]],
    "dashboard": [["--host", LINE, "--no-open"]],
    "runs": [["list"], ["list", "--json"], ["show", "demo"], ["show", "demo", "--json"], ["finish", "demo"]],
    **{name: [["--set", f"addresses.trainer={LINE}"]] for name in ("pause", "resume", "checkpoint", "stop")},
    "drain": [[LINE], [DEAD]],
    "rollback": [[LINE, "--to", "3", "--checkpoints", "FOLDER/run"]],
    "audit": [[LINE]],
    "backup": [["FOLDER/b", "--set", f"broker.redis_url={LINE}"]],
    "restore": [[LINE], [f"FOLDER/{LINE}"]],
    "dead": [["list", "demo"], ["list", "demo", "--json"], ["show", "demo", DEAD], ["show", "demo", DEAD, "--json"]],
    "eval": [[LINE, "held"], ["./none", LINE], [f"./{LINE}", "FOLDER/p.jsonl", "--verifier", "math"]],
    "rescore": [[LINE], ["FOLDER/broken.jsonl"]],
    "plot": [[LINE]],
    "compare": [[LINE], ["FOLDER/run", "--metric", LINE], ["FOLDER/run"], ["FOLDER/run", "--json"]],
    "export": [[LINE, "--push", "own/mine"], ["FOLDER", "--push", LINE]],
    "certs": [["issue", "FOLDER", LINE, "--role", "rollout"]],
    "contract-test": [["--service", "reward", "--target", LINE]],
    "migrate-colossalchat": [["-m", LINE, "-d", "d"], ["-m", "m", "-d", "d", "--unheard-of", LINE]],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "broken.jsonl").write_text(json.dumps({f"promt{LINE}": 1}, ensure_ascii=False))
    (tmp_path / "run.toml").write_text(
        f"[run]\nid = 'demo'\n[data]\ntrain = '{tmp_path}/p.jsonl'\nrequire_reference = false\n"
    )
    (tmp_path / "run").mkdir()
    hostile = {"kind": "step", "step": 0, "time": 1.0, f"reward/{LINE}/mean": 0.5}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(hostile) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(name, each) for name, given in COMMANDS.items() for each in given],
    ids=lambda part: part if isinstance(part, str) else ascii(" ".join(part))[:40],
)
def test_no_command_lets_others_steer_the_terminal(quartet, folder, command, arguments):
    _, shown = quartet(command, *(each.replace("FOLDER", str(folder)) for each in arguments))
    text = OWN.sub("", shown)
    assert not CONTROLS.search(text) and not FORGED.search(text), text
    assert "1b]52;" in text, "the hostile text is not shown at all"


def test_a_bug_s_traceback_does_not_either(monkeypatch, capsys):
    def fail() -> None:
        raise ZeroDivisionError(LINE)

    monkeypatch.setattr(command_line, "main", fail)
    assert entry() == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: \\u001b]52;" in shown and not CONTROLS.search(shown)


def test_each_command_is_tried():
    assert COMMANDS.keys() == cli.commands.keys()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred\x07", "\\u001b[31mred\\u0007"),
        ("\x9b1A\x7f\r", "\\u009b1A\\u007f\\u000d"),
        ("\u202eabc\u2066\u061c\u2028", "\\u202eabc\\u2066\\u061c\\u2028"),
        ("\ud800 é 数 👍", "\\ud800 é 数 👍"),
    ],
)
def test_controls_are_shown_as_their_escapes_and_json_stays_the_same(text, shown):
    assert visible(text) == shown and one_line(text) == shown.replace("\n", "\\n")
    assert block(text) == shown.replace("\n", "\n    ")
    assert json.loads(visible(json.dumps({"a": text}, ensure_ascii=False))) == {"a": text}
