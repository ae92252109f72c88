"""The ledger: what a checkpoint's mark promises, whoever was killed whenever."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from quartet_common.ledger import Ledger, LedgerError, ledger_digest, read_ledger, settlement


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints" / "ledger.jsonl"


def test_what_was_appended_before_a_mark_is_read_back_by_it(path):
    ledger = Ledger(path)
    ledger.append(0, ["pass-0/0", "pass-0/1"])
    first = ledger.mark()
    ledger.append(1, ["pass-0/2"])
    second = json.loads(json.dumps(ledger.mark()))
    assert (first["steps"], second["steps"], second["bytes"]) == (1, 2, path.stat().st_size)
    assert read_ledger(path, first) == [(0, ["pass-0/0", "pass-0/1"])]
    assert read_ledger(path, second) == [(0, ["pass-0/0", "pass-0/1"]), (1, ["pass-0/2"])]
    assert read_ledger(path, None) == []


def test_rewind_cuts_off_what_the_checkpoint_does_not_have(path):
    ledger = Ledger(path)
    ledger.append(0, ["a"])
    mark = ledger.mark()
    ledger.append(1, ["lost"])
    later = Ledger(path)
    later.rewind(mark)
    later.append(1, ["b"])
    assert read_ledger(path, later.mark()) == [(0, ["a"]), (1, ["b"])]
    later.rewind(None)
    assert path.read_bytes() == b"" and later.mark()["steps"] == 0
    later.append(0, ["a"])
    assert later.mark() == mark, "the same steps make the same mark"


def test_a_replaced_writer_that_lives_on_does_not_reach_the_file(path):
    old = Ledger(path)
    old.append(0, ["a"])
    mark = old.mark()
    new = Ledger(path)
    new.rewind(mark)
    old.append(1, ["too late"])
    new.append(1, ["b"])
    assert read_ledger(path, new.mark()) == [(0, ["a"]), (1, ["b"])]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes().replace(b"a", b"x")), "have the checksum"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 28 bytes; the checkpoint's ledger has 29"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_another_ledger_than_the_marks_is_refused_and_left_alone(path, damage, said):
    ledger = Ledger(path)
    ledger.append(0, ["a"])
    mark = ledger.mark()
    ledger.close()
    damage(path)
    left = path.read_bytes() if path.exists() else None
    with pytest.raises(LedgerError, match=said):
        Ledger(path).rewind(mark)
    with pytest.raises(LedgerError, match=said):
        read_ledger(path, mark)
    assert (path.read_bytes() if path.exists() else None) == left


@pytest.mark.parametrize("mark", [{}, {"bytes": "many", "xxh3": ""}, {"bytes": 1}, 3])
def test_a_mark_or_a_line_that_is_none_is_refused(path, mark):
    ledger = Ledger(path)
    ledger.append(0, ["a"])
    with pytest.raises(LedgerError, match="fields bytes and xxh3"):
        read_ledger(path, mark)
    path.write_bytes(b'{"step":0}\n')
    with pytest.raises(LedgerError, match="is no ledger"):
        read_ledger(path, Ledger(path).mark())


def test_a_marks_digest_is_that_of_its_lines_across_rewinds(path):
    batches = [["a", "b"], [], ["c"]]
    first = Ledger(path)
    first.append(0, batches[0])
    first.append(1, batches[1])
    mark = first.mark()
    first.append(2, ["undone"])
    second = Ledger(path)
    second.rewind(mark)
    second.append(2, batches[2])
    mark = second.mark()
    assert mark["digest"] == ledger_digest(batches)
    assert list(settlement(path, mark, 3, 3, ledger_digest(batches))) == []
    with pytest.raises(LedgerError, match="has other groups"):
        list(settlement(path, mark, 3, 3, ledger_digest([["a", "b"], [], ["x"]])))
    with pytest.raises(LedgerError, match="lacks step 3"):
        list(settlement(path, mark, 4, 4, mark["digest"]))
    path.write_bytes(path.read_bytes().replace(b"c", b"x"))
    with pytest.raises(LedgerError, match="have the checksum"):
        list(settlement(path, mark, 3, 3, mark["digest"]))


def test_a_digest_is_unknown_after_lines_of_an_earlier_release_or_a_gap(path):
    ledger = Ledger(path)
    ledger.append(0, ["a"])
    earlier = {key: value for key, value in ledger.mark().items() if key != "digest"}
    resumed = Ledger(path)
    resumed.rewind(earlier)
    resumed.append(1, ["b"])
    mark = resumed.mark()
    assert (mark["digest"], mark["steps"]) == (None, 2)
    assert list(settlement(path, mark, 2, 2, ledger_digest([["a"], ["b"]]))) == []
    with pytest.raises(LedgerError, match="has other groups"):
        list(settlement(path, mark, 2, 2, ledger_digest([["a"], ["x"]])))
    resumed.rewind(None)
    resumed.append(1, ["b"])
    assert resumed.mark()["digest"] is None
    with pytest.raises(LedgerError, match="lacks step 0"):
        list(settlement(path, resumed.mark(), 1, 1, ledger_digest([["b"]])))


_WRITER = """
import json
import sys
from pathlib import Path
from quartet_common.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.rewind(None)
for step in range(10**9):
    ledger.append(step, [f"pass-0/{step}"] * 50)
    if step % 100 == 99:
        print(json.dumps(ledger.mark()), flush=True)
"""


def test_every_mark_that_was_taken_holds_after_a_kill(path):
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        marks = [json.loads(writer.stdout.readline()) for _ in range(3)]
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=30)
    marks += [json.loads(line) for line in writer.stdout if line.endswith("}\n")]
    ledger = Ledger(path)
    for mark in reversed(marks):
        ledger.rewind(mark)
        assert [step for step, _ in read_ledger(path, mark)] == list(range(mark["steps"]))
    ledger.append(100, ["next"])
    assert read_ledger(path, ledger.mark())[-1] == (100, ["next"])


def test_a_full_disk_is_an_os_error(path):
    ledger = Ledger(path)
    ledger.append(0, ["a"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(OSError):
            ledger.append(1, ["b" * 100])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    ledger.append(1, ["c"])
    assert read_ledger(path, ledger.mark()) == [(0, ["a"]), (1, ["c"])], "no half a line is left"
