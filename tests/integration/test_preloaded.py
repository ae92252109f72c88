"""A preloaded interpreter: every process of it is as `python` would have started it, but for what was imported once."""

import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import Preloaded

TOY = """
import os, resource, sys
from toy import part
part.COUNT += 1
print(part.COUNT, sys.argv[1:], os.environ.get("WORD"), os.getcwd(), resource.getrlimit(resource.RLIMIT_FSIZE)[0])
sys.exit(sys.stdin.read())
"""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    package = tmp_path_factory.mktemp("site") / "toy"
    package.mkdir()
    for name, text in (("__init__", ""), ("__main__", TOY), ("part", "COUNT = 0\n")):
        (package / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package.parent))
        made = Preloaded(sys.executable, "toy.part")
    yield made.python
    made.close()


@pytest.mark.parametrize("round", range(2))
def test_a_process_has_what_its_starter_gives_it_and_nothing_of_an_earlier_one(python, tmp_path, round):
    done = subprocess.run(
        [python, "-m", "toy", "a", "b"],
        cwd=tmp_path,
        env={**os.environ, "WORD": "said"},
        input="the end",
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )
    assert (done.stdout, done.stderr) == (f"1 ['a', 'b'] said {tmp_path} 10000\n", "the end\n")
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("code", "status", "errors"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("atexit.register(print, 'done', file=sys.stderr)", 0, "done"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_as_the_process_does(python, code, status, errors):
    done = subprocess.run([python, "-c", f"import atexit, os, sys; {code}"], capture_output=True, text=True)
    assert done.returncode == status and errors in done.stderr


WAITS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_process_too(python, number):
    with subprocess.Popen([python, "-c", WAITS], stdout=subprocess.PIPE, text=True) as asker:
        process = os.pidfd_open(int(asker.stdout.readline()))
        asker.send_signal(number)
        assert asker.wait() == -number
        assert select.select([process], [], [], 30)[0], "it goes on"
        os.close(process)
