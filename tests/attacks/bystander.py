"""Makes ordinary calls to each service continuously: `python bystander.py RUN '{"broker": …}'`.

Prints a line for each call, until it is killed: start (time.monotonic), kind, seconds, status code. The kind "timer" is
not a call: its seconds are by how much a sleep was too long, a delay that all other figures contain too.
"""

import json
import sys
import threading
import time

from google.protobuf.message import Message
from quartet.v1 import broker_pb2, reward_pb2

from quartet_contract.calls import CHEAP, Caller

PAUSE_SECONDS = 0.03
DEADLINE_SECONDS = 20.0
ITEM = reward_pb2.ScoreItem(
    item_id="a",
    completion="<think>1</think><answer>2</answer>",
    reference=reward_pb2.Reference(answer="2"),
    verifiers=[reward_pb2.VerifierSpec(name="think_answer_tags")],
)


def say(began: float, kind: str, seconds: float, code: str) -> None:
    print(f"{began} {kind} {seconds} {code}\n", end="", flush=True)  # in one piece: the threads share the output


def repeat(kind: str, address: str, rpc: str, request: Message) -> None:
    """Repeat a call."""
    caller, data = Caller(address), request.SerializeToString()
    while True:
        began = time.monotonic()
        error = caller.raw(rpc, data, DEADLINE_SECONDS)
        say(began, kind, time.monotonic() - began, error.code().name if error else "OK")
        time.sleep(PAUSE_SECONDS)


def main(run_id: str, addresses: dict[str, str]) -> None:
    """Make calls of all kinds until killed."""
    calls = CHEAP | {
        "broker": ("BrokerService.GetRun", broker_pb2.GetRunRequest(run_id=run_id)),
        "reward": ("RewardService.Score", reward_pb2.ScoreRequest(items=[ITEM])),
    }
    for kind, (rpc, request) in calls.items():
        threading.Thread(target=repeat, args=(kind, addresses[kind], rpc, request), daemon=True).start()
    while True:
        began = time.monotonic()
        time.sleep(PAUSE_SECONDS)
        say(began, "timer", time.monotonic() - began - PAUSE_SECONDS, "OK")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
