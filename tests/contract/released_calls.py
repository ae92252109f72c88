"""Every call of a release's own contract tests, made by its own stubs and client; run with that release on PYTHONPATH.

    python released_calls.py ORDERS      a JSON file: {"addresses": by kind, "python": with torch, "model", "folder",
                                         "epoch", "version": the rollout's newest, "run": that does not exist}

It imports nothing of today. Prints a line of JSON a call: {"rpc", "title", "why"}; `why` is empty if it went as the
release expects. The last line is {"epoch", "version"}: the newest that the rollout has seen.
"""

import asyncio
import importlib
import json
import sys
import traceback
from pathlib import Path

from contract_calls import OWNERS, Caller
from contract_cases import Good
from contract_world import World
from use_client import use_client
from weight_arrangements import Peer, WeightEpochs

MODULES = (
    "handshake",
    "broker_runs",
    "broker_prompts",
    "broker_training",
    "broker_results",
    "reward",
    "rollout",
    "trainer",
)


def call_all(orders: dict) -> tuple[int, int]:
    """Make the calls of all cases. Returns the newest epoch and version."""
    callers = {OWNERS[kind]: Caller(address) for kind, address in orders["addresses"].items()}
    callers["HandshakeService"] = callers["BrokerService"]
    folder = Path(orders["folder"])
    peer = Peer(Path(orders["python"]), folder / "released-peer.log")
    weights = WeightEpochs(orders["engine"], orders["run"], peer, [Path(orders["model"])])
    weights.epoch, weights.version = orders["epoch"], orders["version"]
    try:
        for module in MODULES:
            for case in importlib.import_module(f"cases_{module}").CASES:
                if isinstance(case, Good) and not case.last:
                    tell(case.rpc, case.title, called(case, callers, weights))
        return weights.epoch, weights.version
    finally:
        peer.close()


def called(case: Good, callers: dict, weights: WeightEpochs) -> str:
    """Make one call; return what was not as expected."""
    world = World(callers, weights)
    try:
        case.check(world, world.call(case.rpc, case.request(world), take=case.take))
        if case.rpc.startswith("RolloutService"):
            weights.settle(world)
    except Exception:  # whatever it is, it is what this program is to tell
        return traceback.format_exc(limit=-3)
    return ""


def tell(rpc: str, title: str, why: str) -> None:
    """Print what became of a call."""
    print(json.dumps({"rpc": rpc, "title": title, "why": why}), flush=True)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    epoch, version = call_all(orders)
    try:
        asyncio.run(use_client(orders["addresses"], "by-a-released-client"))
        tell("client", "a person's use of it", "")
    except Exception:
        tell("client", "a person's use of it", traceback.format_exc())
    print(json.dumps({"epoch": epoch, "version": version}), flush=True)


if __name__ == "__main__":
    main()
