"""What the broker says of a run in the end: `python books.py RUN GROUPS BROKER...` prints it as JSON.

A process of its own, because the harness may stand outside the namespaces.
"""

import asyncio
import json
import sys

import content
import grpc
from google.protobuf.json_format import MessageToDict
from peers import Peers
from quartet.v1 import broker_pb2, broker_pb2_grpc

AT_ONCE = 16
NOT_THERE = "NOT_FOUND"


async def main(run_id: str, groups: int, brokers: list[str]) -> None:
    """Print the run and where each instance is."""
    broker = Peers(broker_pb2_grpc.BrokerServiceStub, brokers)
    run = (await broker.unary("GetRun", broker_pb2.GetRunRequest(run_id=run_id), timeout=10.0)).run
    room = asyncio.Semaphore(AT_ONCE)

    async def place_of(name: str) -> str:
        request = broker_pb2.GetGroupRequest(run_id=run_id, instance_id=name)
        async with room:
            try:
                state = (await broker.unary("GetGroup", request, timeout=10.0)).state
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise
                return NOT_THERE
        return broker_pb2.GroupState.Name(state).removeprefix("GROUP_STATE_")

    names = content.instance_names(groups)
    places = dict(zip(names, await asyncio.gather(*map(place_of, names)), strict=True))
    told = MessageToDict(run, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(
        json.dumps({"state": told["state"], "stats": {k: int(v) for k, v in told["stats"].items()}, "places": places})
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
