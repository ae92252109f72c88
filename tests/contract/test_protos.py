"""What the contract says of its methods, and the stubs made from it. What buf says of it is the suite `protos`."""

import filecmp
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
FILES = sorted((PROTOS / "quartet" / "v1").glob("*.proto"))


def test_the_stubs_are_those_of_the_protos(tmp_path):
    subprocess.run([str(PROTOS / "generate.sh"), sys.executable, str(tmp_path)], check=True, timeout=120)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert len(made) == 4 * len(FILES)
    differing = [
        str(path) for path in made if not filecmp.cmp(tmp_path / path, PROTOS / "python" / path, shallow=False)
    ]
    assert not differing, f"run protos/generate.sh: {differing}"


@pytest.mark.parametrize("proto", FILES, ids=lambda path: path.name)
def test_every_method_says_who_calls_it_and_whether_it_may_be_retried(proto):
    comment: list[str] = []
    for line in proto.read_text().splitlines():
        if line.strip().startswith("//"):
            comment.append(line)
            continue
        if method := re.match(r"\s*rpc (\w+)", line):
            said = " ".join(comment)
            assert "Called by:" in said, method[1]
            assert re.search(r"[Ii]dempotent|Safe to call again|request side drains", said), method[1]
        comment = []
