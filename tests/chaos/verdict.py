"""Was each group trained exactly once? `quartet audit` says so; and the harness, which knows what was to be trained,
looks for itself at ledger, weights and broker."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import content
from checkpoint_folder import manifests
from town import ENVIRONMENTS, HERE, RUN, Town

from quartet_common.ledger import LEDGER_FILE, LedgerError, read_ledger

_SECONDS = 120.0
_AT_REST = ("queued", "leased", "ready", "leased_to_trainer", "trained", "dead", "dropped", "experience_bytes")


@dataclass
class Verdict:
    """What was found.

    Attributes:
        audit: what `quartet audit --json` printed; its exit status under "status".
        seen: what the harness found wrong by itself, in sentences.
        stats: the run's RunStats.
    """

    audit: dict[str, Any] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """True if nothing was found wrong, by either."""
        return self.audit.get("status") == 0 and self.audit.get("ok") is True and not self.seen

    def line(self) -> str:
        """What the audit counted, in one line."""
        counted = ("exactly_once", "lost", "twice", "stuck")
        return ", ".join(f"{self.audit.get(key, '?')} {key.replace('_', ' ')}" for key in counted)


async def judge(town: Town) -> Verdict:
    """Look at what a finished run left behind. Raises RuntimeError if that cannot be read."""
    folder = town.plan.checkpoints(town.finished)
    broker = town.brokers()[0]
    dev = ENVIRONMENTS / "dev" / "bin" / "python"
    command = [str(dev), "-m", "quartet_client", "audit", RUN, "--broker", broker, "--checkpoints", str(folder)]
    status, told, words = await _run(town, [*command, "--json"])
    if status not in (0, 1):
        raise RuntimeError(f"quartet audit ended with status {status}: {words}")
    command = [str(dev), str(HERE / "books.py"), RUN, str(town.plan.groups), broker]
    books_status, books, words = await _run(town, command)
    if books_status:
        raise RuntimeError(f"the broker's books cannot be read: {words}")
    found = json.loads(books)
    return Verdict({**json.loads(told), "status": status}, look(town, found), found["stats"])


def look(town: Town, books: dict[str, Any]) -> list[str]:
    """Compare ledger, weights and broker with what was to be trained; what is wrong, in sentences."""
    folder = town.plan.checkpoints(town.finished)
    wanted = content.instance_names(town.plan.groups)
    newest = manifests(folder)[-1]
    wrong = []
    try:
        entries = read_ledger(folder / LEDGER_FILE, newest["ledger"])
    except LedgerError as error:
        return [str(error)]
    times = Counter(instance_id for _, instance_ids in entries for instance_id in instance_ids)
    counts = {
        "never": [name for name in wanted if not times[name]],
        "more than once": [name for name in wanted if times[name] > 1],
        "but were never submitted": [name for name in times if name not in set(wanted)],
    }
    wrong += [f"{len(names)} trained {how}, such as {names[0]}" for how, names in counts.items() if names]
    if [step for step, _ in entries] != list(range(newest["step"])):
        wrong.append(f"the ledger's steps are not 0 to {newest['step'] - 1}, each once and in order")
    weights = content.NO_WEIGHTS
    for _, instance_ids in entries:
        weights = content.train(weights, instance_ids)
    if weights != (newest["path"] / "weights.txt").read_text():
        wrong.append("the weights of the newest checkpoint are not those that its ledger makes")
    elsewhere = Counter(place for place in books["places"].values() if place != "COMMITTED")
    wrong += [f"{number} groups are {place} at the broker" for place, number in elsewhere.items()]
    wrong += [f"RunStats.{key} is {books['stats'][key]}, not 0" for key in _AT_REST if books["stats"][key]]
    if books["stats"]["committed"] != town.plan.groups:
        wrong.append(f"RunStats.committed is {books['stats']['committed']}, not {town.plan.groups}")
    if books["state"] != "RUN_STATE_SUCCEEDED":
        wrong.append(f"the run is {books['state']}")
    return wrong


async def _run(town: Town, command: list[str]) -> tuple[int, str, str]:
    """Return status, standard output and the last line that was said."""
    process = await asyncio.create_subprocess_exec(
        *town.place.command("feeder", command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = (output + errors).decode(errors="replace").strip().splitlines()
    return process.returncode or 0, output.decode(errors="replace"), lines[-1] if lines else "it said nothing"
