"""Runs attacks in several threads: `python attackers.py '{"seconds": 10, …}'` prints counts of status codes as JSON.

The process has a low priority, because real attackers do not use the services' processors.
"""

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
from attacks import ATTACKS, Attack, Attacker
from quartet.v1 import broker_pb2

THREADS = 6


def main(run_id: str, addresses: dict[str, str], seconds: float, seed: int) -> dict[str, dict[str, int]]:
    """Attack for `seconds`, and until all attacks were made equally often; return the counts of codes by attack."""
    end = time.monotonic() + seconds
    codes_by_attack: dict[str, Counter[str]] = {attack.name: Counter() for attack in ATTACKS}
    lock, shuffling = threading.Lock(), random.Random(seed)
    deck = shuffling.sample(ATTACKS, len(ATTACKS))

    def draw() -> Attack | None:
        with lock:
            if not deck and time.monotonic() < end:
                deck.extend(shuffling.sample(ATTACKS, len(ATTACKS)))
            return deck.pop() if deck else None

    def work(number: int) -> None:
        attacker = Attacker(run_id, f"own-{number}-{seed}", addresses, random.Random(f"{seed}/{number}"))
        spec = broker_pb2.RunSpec(run_id=attacker.own_run, groups_per_step=2, group_size=2)
        attacker.ask("BrokerService.CreateRun", broker_pb2.CreateRunRequest(spec=spec))
        while attack := draw():
            try:
                codes = list(attack.act(attacker))
            except grpc.RpcError as error:
                codes = [error.code().name]
            except OSError as error:  # a connection that was refused
                codes = [type(error).__name__]
            with lock:
                codes_by_attack[attack.name].update(codes)
        attacker.close()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    return {name: dict(codes) for name, codes in codes_by_attack.items()}


if __name__ == "__main__":
    os.nice(10)
    print(json.dumps(main(**json.loads(sys.argv[1]))))
