"""Every row of docs/runbook.md: its symptom is made, its command is run, and what is seen is what the page says.

One run is shared by all rows, in the order of the page except that the run is ended last.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from by_hand import PACED, ROOT, ByHand
from preloaded import Pythons
from started import Started

from quartet_client import Client

pytestmark = pytest.mark.timeout(200)
RUN = "runbook"
RUN_FILE = """
[run]
id = "runbook"
folder = "{folder}/run"
group_size = 2
groups_per_step = 2
max_staleness = 1
max_steps = 1000000
max_queued_prompts = 64
member_ttl = 3
prompt_lease_ttl = 5
[run.sampling]
max_new_tokens = 4
[model]
path = "{model}"
[data]
train = "{folder}/train.jsonl"
passes = 0
[data.evaluation]
heldout = "{folder}/heldout.jsonl"
[broker]
redis_timeout = 1.0
[reward]
functions = ["{folder}/slow.py:slow"]
[rollout]
engine = "transformers"
[rollout.scoring]
attempts = 1
[trainer]
tensorboard = false
callbacks = {paced}
[trainer.weights]
timeout_seconds = 5
[trainer.evaluation]
interval = 0
before_training = false
at_end = false
[trainer.checkpoint]
interval = 4
folder = "{folder}/disk/checkpoints"
"""
SLOW = """
import time

def slow(completion):
    time.sleep(0.25)
    return 1.0
"""


@dataclass(frozen=True)
class Row:
    """A row of the page; `seen` is its first text in code font."""

    symptom: str
    command: str
    seen: str


def rows() -> list[Row]:
    page = (ROOT / "docs" / "runbook.md").read_text()
    cells = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    code = re.compile(r"`([^`]+)`")
    found = [
        Row(one.strip(), code.findall(command)[0], code.findall(seen)[0])
        for one, command, seen in cells
        if one.strip() != "symptom"
    ]
    return sorted(found, key=lambda row: "runs finish" in row.command)


class Book:
    """The services of the run, and the `quartet` command."""

    def __init__(self, services: ByHand, folder: Path, has_disk: bool):
        self.services, self.folder, self.has_disk = services, folder, has_disk
        self.checkpoints = folder / "disk" / "checkpoints"
        self.backup = folder / "backup"

    def command(self, words: str, **given: str) -> Started:
        """Start a command of the page, with `given` for its words in capitals."""
        for name, value in {"RUN": RUN, **given}.items():
            words = re.sub(rf"\b{name}\b", value, words)
        program, *rest = words.split()
        if program == "curl":
            command = [program, *rest]
        else:
            config = [] if rest[0] == "certs" else ["--config", *self.services.arguments]
            command = [self.services.pythons["client"], "-m", "quartet_client", *rest, *config]
        return Started(command, self.folder / "command.log", cwd=ROOT, env={**os.environ, "COLUMNS": "400"})

    def client(self) -> Client:
        return Client(**self.services.addresses)

    def until(self, condition: Callable[[Client], bool], what: str) -> None:
        """Wait until something is true of the run."""
        with self.client() as client:
            self.services.wait_until("redis", lambda: condition(client), what)

    def trained(self, steps: int = 1) -> None:
        """Wait until so many more steps are trained."""
        with self.client() as client:
            wanted = client.get_run(RUN).policy_version + steps
        self.until(lambda client: client.get_run(RUN).policy_version >= wanted, f"version {wanted}")

    def start(self, name: str) -> None:
        self.services.start(name)
        self.services.wait_for(name, "serving at")


@pytest.fixture(scope="module")
def book(pythons: Pythons, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Book]:
    """A run that has trained some steps."""
    folder = tmp_path_factory.mktemp("runbook")
    for name in ("train", "heldout"):
        lines = (json.dumps({"prompt": f"{n}+1=?", "gt_answer": str(n + 1)}) + "\n" for n in range(8))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "slow.py").write_text(SLOW)
    (folder / "run.toml").write_text(RUN_FILE.format(folder=folder, model=model, paced=PACED))
    (folder / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder / "disk")]
    has_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        with contextlib.closing(ByHand(folder, folder / "run.toml", pythons, {})) as services:
            made = Book(services, folder, has_disk)
            services.start_redis()
            for name in ("broker", "reward", "rollout", "trainer"):
                services.start(name)
            for name in ("broker", "reward", "rollout", "trainer"):
                services.wait_for(name, "serving at")
            services.client("run", "--attach", "--plain", *services.arguments)
            services.wait_for("client", "\nstep 5/")
            yield made
    finally:
        if has_disk:
            subprocess.run(["umount", "-l", folder / "disk"], check=True)


Given = dict[str, str]
Setup = Callable[[Book], AbstractContextManager[Given]]


@contextmanager
def nothing(book: Book) -> Iterator[Given]:
    yield {}


@contextmanager
def drained(book: Book) -> Iterator[Given]:
    address = book.services.addresses["rollout"]
    with book.client() as client:
        client.drain(address, grace=0)
        book.services.wait_until(
            "trainer",
            lambda: "a rollout to join the run" in client.get_service("trainer").waiting_for,
            "it waits for a rollout",
        )
        yield {"HOST:PORT": address}
        client.drain(address, undo=True)
    book.trained()


@contextmanager
def full_queue(book: Book) -> Iterator[Given]:
    with drained(book) as given:
        yield given
        book.services.wait_for("client", "waiting: the broker's queue is full")
    book.services.wait_for("client", "going on: queue")


@contextmanager
def no_broker(book: Book) -> Iterator[Given]:
    book.services.stop("broker")
    yield {}
    book.services.wait_for("client", "waiting: the broker cannot be reached at")
    book.start("broker")
    book.services.wait_for("client", "going on: broker")
    book.trained()


@contextmanager
def no_redis(book: Book) -> Iterator[Given]:
    book.services.processes["redis"].close()
    book.services.wait_for("client", "waiting: the broker is not serving: it waits for an answer of Redis")
    yield {}
    book.services.start_redis()
    book.trained()


@contextmanager
def full_redis(book: Book) -> Iterator[Given]:
    url = f"redis://127.0.0.1:{book.services.redis_port}/0"

    def limit(size: str) -> None:
        program = f"import redis; redis.Redis.from_url('{url}').config_set('maxmemory', '{size}')"
        python = ROOT / ".quartet" / "envs" / "broker" / "bin" / "python"
        subprocess.run([python, "-c", program], check=True, timeout=30)

    limit("1")
    book.services.wait_for("client", "waiting: the broker waits for room in Redis: its memory is full")
    yield {}
    limit("0")
    book.trained()


@contextmanager
def full_disk(book: Book) -> Iterator[Given]:
    if not book.has_disk:
        pytest.skip("needs the right to mount a small disk")
    filler = book.folder / "disk" / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
            file.flush()
    with book.client() as client:

        def waits() -> bool:
            return "space on the disk" in " ".join(client.get_service("trainer").waiting_for)

        book.services.wait_until("trainer", waits, "it waits for space")
    yield {}
    filler.unlink()
    book.trained(2)


@contextmanager
def overloaded(book: Book) -> Iterator[Given]:
    host, port = book.services.addresses["reward"].split(":")
    with book.client() as client:
        asking = threading.Thread(
            target=client.score, args=(["x"] * 24, {"prompt": "?"}, [f"{book.folder}/slow.py:slow"]), daemon=True
        )
        asking.start()
        metrics = f"http://{host}:{int(port) + 100}/metrics"
        depth = re.compile(r'quartet_reward_queue_depth\{queue="[^"]*slow[^"]*",state="waiting"\} [1-9]')

        def waits() -> bool:
            done = subprocess.run(["curl", "-s", metrics], capture_output=True, text=True, timeout=10, check=True)
            return depth.search(done.stdout) is not None

        book.services.wait_until("reward", waits, "calls wait")
        yield {"HOST:PORT": f"{host}:{int(port) + 100}"}
        asking.join(60)


@contextmanager
def dead(book: Book) -> Iterator[Given]:
    with book.client() as client:
        if not client.list_dead(RUN)[1]:
            prompt = {"prompt": "?", "verifiers": ["nobody_has_it"]}
            client.submit(RUN, prompt, purpose="train", instance_ids=["dead/0"])
    book.until(lambda client: client.list_dead(RUN)[1] == 1, "a dead prompt")
    yield {}


@contextmanager
def committed(book: Book) -> Iterator[Given]:
    lines = (book.checkpoints / "ledger.jsonl").read_text().splitlines()
    name = json.loads(lines[0])["instances"][0]
    yield {"GROUP_ID": name}


@contextmanager
def hanging(book: Book) -> Iterator[Given]:
    rollout = book.services.processes["rollout"]
    rollout.signal(signal.SIGSTOP)
    yield {"HOST:PORT": book.services.addresses["rollout"]}
    rollout.close()
    book.start("rollout")
    book.trained()


@contextmanager
def at(book: Book) -> Iterator[Given]:
    yield {"HOST:PORT": book.services.addresses["rollout"]}


@contextmanager
def working_again(book: Book) -> Iterator[Given]:
    yield {"HOST:PORT": book.services.addresses["rollout"]}
    book.trained()


@contextmanager
def trained_on(book: Book) -> Iterator[Given]:
    yield {}
    book.trained()


@contextmanager
def new_folder(book: Book) -> Iterator[Given]:
    yield {"FOLDER": str(book.backup)}
    assert (book.backup / "manifest.json").is_file()


@contextmanager
def certificates(book: Book) -> Iterator[Given]:
    pki = book.folder / "pki"
    assert book.command(f"quartet certs init {pki} --host localhost --days 1").wait(60) == 0
    yield {"FOLDER": str(pki)}
    shown = book.command(f"quartet certs show {pki}")
    assert shown.wait(60) == 0 and re.search(r"^rollout .* 90 *$", shown.said(), re.MULTILINE), shown.said()


@contextmanager
def stopping(book: Book) -> Iterator[Given]:
    yield {}
    assert book.services.processes["trainer"].wait(60) == 0


@contextmanager
def a_kept_step(book: Book) -> Iterator[Given]:
    kept = sorted(int(path.name[5:]) for path in book.checkpoints.glob("step-*"))
    yield {"STEP": str(kept[-2])}


@contextmanager
def lost_redis(book: Book) -> Iterator[Given]:
    assert book.services.stop("client", signal.SIGINT) == 130
    book.services.processes["redis"].close()
    for path in book.services.redis_data.rglob("*"):
        if path.is_file():
            path.unlink()
    book.services.start_redis()
    yield {"FOLDER": str(book.backup)}


@contextmanager
def started_again(book: Book) -> Iterator[Given]:
    book.start("trainer")
    book.services.client("run", "--attach", "--plain", *book.services.arguments)
    book.trained(2)
    yield {}


@contextmanager
def ended(book: Book) -> Iterator[Given]:
    yield {}
    assert book.services.processes["client"].wait(60) == 1
    assert "run runbook was cancelled: enough" in book.services.processes["client"].said()
    assert book.services.processes["trainer"].wait(60) == 0


SETUPS: dict[str, Setup] = {
    "training stands": drained,
    "the queue is full, and no rollout takes prompts": full_queue,
    "the broker is away": no_broker,
    "Redis is away": no_redis,
    "Redis is full": full_redis,
    "the disk of the trainer is full": full_disk,
    "the reward service is overloaded": overloaded,
    "prompts are dead": dead,
    "dead prompts whose cause is repaired": dead,
    "an evaluation never ends": nothing,
    "a group is to be traced": committed,
    "a rollout is to be taken out": at,
    "it is to work again": working_again,
    "a rollout hangs": hanging,
    "maintenance of what the trainer uses": nothing,
    "the maintenance is over": trained_on,
    "a checkpoint is wanted before maintenance": nothing,
    "a backup is wanted": new_folder,
    "the trainer's host is to be restarted": stopping,
    "a certificate expires soon": certificates,
    "the run is to end early": ended,
    "the loss explodes, or the rewards collapse: which checkpoints are kept?": nothing,
    "go back to one": a_kept_step,
    "Redis has lost the run": lost_redis,
    "after a rollback or a restore, once the trainer has started": started_again,
}
ENDLESS = ("quartet watch",)
"""Commands that run until they are interrupted."""


def test_each_row_has_its_symptom():
    assert {row.symptom for row in rows()} == SETUPS.keys()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.symptom)
def test_runbook_row_shows_symptom_and_cure(row: Row, book: Book):
    seen = re.compile(".+".join(map(re.escape, row.seen.split("…"))))
    with SETUPS[row.symptom](book) as given:
        asked = book.command(row.command, **given)
        with contextlib.closing(asked):
            if row.command.startswith(ENDLESS):
                asked.wait_until(lambda: seen.search(asked.said()) is not None, f"it says '{row.seen}'", 30)
            else:
                asked.wait(60)
        assert seen.search(asked.said()), asked.said() + book.services.logs()
        assert "Traceback" not in asked.said()
