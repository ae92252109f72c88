"""The contract itself: linted, compatible with what was released, and the stubs made from it."""

import filecmp
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
RELEASED = sorted((PROTOS / "released").glob("*.binpb"))


def buf(*arguments: str, folder: Path = PROTOS) -> subprocess.CompletedProcess[str]:
    executable = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert executable, "buf is missing from the development environment"
    return subprocess.run([executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_lint_is_clean():
    result = buf("lint")
    assert result.returncode == 0, result.stdout


def test_format_is_bufs():
    result = buf("format", "--diff", "--exit-code")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("image", RELEASED, ids=lambda path: path.stem)
def test_nothing_released_is_broken(image):
    result = buf("breaking", "--against", str(image))
    assert result.returncode == 0, result.stdout


def test_the_breaking_check_would_see_a_renumbered_field(tmp_path):
    copy = shutil.copytree(PROTOS, tmp_path / "protos", ignore=shutil.ignore_patterns("python"))
    tensor = copy / "quartet" / "v1" / "tensor.proto"
    tensor.write_text(tensor.read_text().replace("bytes data = 3;", "bytes data = 4;"))
    result = buf("breaking", "--against", str(RELEASED[0]), folder=copy)
    assert result.returncode != 0 and "tensor.proto" in result.stdout


def test_the_stubs_are_those_of_the_protos(tmp_path):
    subprocess.run([str(PROTOS / "generate.sh"), sys.executable, str(tmp_path)], check=True, timeout=120)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert len(made) == 3 * len(list((PROTOS / "quartet" / "v1").glob("*.proto")))
    differing = [
        str(path) for path in made if not filecmp.cmp(tmp_path / path, PROTOS / "python" / path, shallow=False)
    ]
    assert not differing, f"run protos/generate.sh: {differing}"


@pytest.mark.parametrize("proto", sorted((PROTOS / "quartet" / "v1").glob("*.proto")), ids=lambda path: path.name)
def test_every_field_method_and_value_is_documented(proto):
    lines = proto.read_text().splitlines()
    element = re.compile(r"^\s*(rpc|message|enum|service|[\w.<>, ]+ \w+ = \d+;|[A-Z0-9_]+ = \d+;)")
    bare = [
        f"{proto.name}:{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if element.match(line) and not lines[number - 1].strip().startswith("//")
    ]
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize("proto", sorted((PROTOS / "quartet" / "v1").glob("*.proto")), ids=lambda path: path.name)
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
