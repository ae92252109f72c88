"""Checks that each group was trained exactly once: with `quartet audit`, and by comparing ledger, weights and counts
with the submitted prompts."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import content
from deployment import RUN, Deployment

from quartet_client import AsyncClient
from quartet_client.models import Run
from quartet_common.checkpoints import newest_checkpoint
from quartet_common.config import SecuritySection
from quartet_common.ledger import LEDGER_FILE, LedgerError, read_ledger

_SECONDS = 120.0
_AT_REST = ("queued", "leased", "ready", "leased_to_trainer", "trained", "dead", "dropped", "experience_bytes")


@dataclass
class Verdict:
    """The results of the checks.

    Attributes:
        audit: the output of `quartet audit --json`; its exit status under "status".
        seen: faults that the harness found, a sentence each.
        stats: the run's RunStats.
    """

    audit: dict[str, Any] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """True if neither found a fault."""
        return self.audit.get("status") == 0 and self.audit.get("ok") is True and not self.seen

    def line(self) -> str:
        counted = ("exactly_once", "lost", "twice", "stuck")
        return ", ".join(f"{self.audit.get(key, '?')} {key.replace('_', ' ')}" for key in counted)


async def judge(deployment: Deployment) -> Verdict:
    """Check a finished run. Raises RuntimeError if the audit fails to run."""
    broker, folder = deployment.brokers()[0], str(deployment.plan.checkpoints(deployment.finished))
    command = [sys.executable, "-m", "quartet_client", "audit", RUN, "--broker", broker, "--checkpoints", folder]
    done = await asyncio.to_thread(
        subprocess.run, [*command, "--json"], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"quartet audit ended with status {done.returncode}: {done.stdout}{done.stderr}")
    # In the network form the broker's address is not loopback.
    async with AsyncClient(broker, security=SecuritySection(insecure=True), timeout=_SECONDS) as client:
        run = await client.get_run(RUN)
    audit = {**json.loads(done.stdout), "status": done.returncode}
    return Verdict(audit, look(deployment, run), asdict(run.stats))


def look(deployment: Deployment, run: Run) -> list[str]:
    """Compare ledger, weights and counts with the submitted prompts; return the faults, a sentence each."""
    folder, wanted = deployment.plan.checkpoints(deployment.finished), content.instance_names(deployment.plan.groups)
    path, newest = newest_checkpoint(folder)
    try:
        entries = read_ledger(folder / LEDGER_FILE, newest["ledger"])
    except LedgerError as error:
        return [str(error)]
    times = Counter(instance_id for _, instance_ids in entries for instance_id in instance_ids)
    counts = {
        "never": [name for name in wanted if not times[name]],
        "more than once": [name for name in wanted if times[name] > 1],
        "but were never submitted": sorted(set(times) - set(wanted)),
    }
    wrong = [f"{len(names)} trained {how}, such as {names[0]}" for how, names in counts.items() if names]
    if [step for step, _ in entries] != list(range(newest["step"])):
        wrong.append(f"the ledger's steps are not 0 to {newest['step'] - 1}, each once and in order")
    weights = content.NO_WEIGHTS
    for _, instance_ids in entries:
        weights = content.train(weights, instance_ids)
    if weights != (path / "weights.txt").read_text():
        wrong.append("the weights of the newest checkpoint are not those that its ledger makes")
    stats = {key: getattr(run.stats, key) for key in _AT_REST}
    wrong += [f"RunStats.{key} is {value}, not 0" for key, value in stats.items() if value]
    if run.stats.committed != deployment.plan.groups:
        wrong.append(f"RunStats.committed is {run.stats.committed}, not {deployment.plan.groups}")
    if run.state != "succeeded":
        wrong.append(f"the run is {run.state}")
    return wrong
