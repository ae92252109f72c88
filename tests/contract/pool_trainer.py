"""The real publisher and membership of the trainer, without its learner; run with the trainer's environment.

    python pool_trainer.py FOLDER BROKER RUN WEIGHTS_FOLDER KEYS      KEYS of [trainer.weights], as JSON

order                                   answer
{"do": "publish", "version"}            {"rollouts", "seconds", "failures"}: once the publisher has done what it can
{"do": "publish", "version", "stop_at": N}  first {"sending": true} before tensor N is packed; it waits for a line
{"do": "members"}                       {"members": [instance ids]}

Each version has the folder's weights, each tensor multiplied by another number near 1.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, tensor_pb2
from safetensors.torch import load_file

from quartet_common.channel import connect_sync
from quartet_common.config import SecuritySection
from quartet_trainer.config import WeightsSection
from quartet_trainer.members import Members
from quartet_trainer.weight_sync.publisher import Publisher
from quartet_trainer.weight_sync.rollouts import Rollouts
from quartet_trainer.weight_sync.transports import create_transport

BUCKET_BYTES = 1 << 16
HEARTBEAT_SECONDS = 0.5


def say(**answer) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Answer orders until standard input ends."""
    torch.set_num_threads(1)
    folder, broker, run, weights_folder, keys = sys.argv[1:]
    parameters = load_file(Path(folder) / "model.safetensors")
    specs = [(name, tensor_pb2.DTYPE_FLOAT32, tuple(tensor.shape)) for name, tensor in parameters.items()]
    me = broker_pb2.Member(
        instance_id="trainer",
        kind=common_pb2.SERVICE_KIND_TRAINER,
        address="127.0.0.1:1",
        state=broker_pb2.MEMBER_STATE_ACTIVE,
    )
    stub = broker_pb2_grpc.BrokerServiceStub(connect_sync(broker))
    members = Members(stub, run, lambda: me, HEARTBEAT_SECONDS, on_change=lambda: None)
    settings = WeightsSection(bucket_bytes=BUCKET_BYTES, overlap=False, **json.loads(keys))
    transport = create_transport(settings, "127.0.0.1", Path(weights_folder))
    publisher = Publisher(run, settings, transport, Rollouts(members, SecuritySection()), specs)

    def weights(version: int, stop_at: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(parameters.items()):
            if index == stop_at:
                say(sending=True)
                sys.stdin.readline()
            yield name, tensor * (1 + 0.01 * ((version * 7 + index) % 5))

    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "members":
            say(members=sorted(members.rollouts()))
            continue
        stops = iter([order.get("stop_at", -1)])  # in the first attempt alone
        began = time.monotonic()
        publisher.begin(
            order["version"], lambda version=order["version"], stops=stops: weights(version, next(stops, -1))
        )
        published = publisher.collect(wait=True)
        say(
            rollouts=published.rollouts if published else publisher.current(order["version"]),
            seconds=time.monotonic() - began,
            failures=published.failures if published else [],
        )
    publisher.close()
    members.close()


if __name__ == "__main__":
    main()
