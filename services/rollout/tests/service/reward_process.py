"""A reward service that is killed and started again: `reward_process.py ADDRESS LIVES`.

So many lives end with the first items, whatever they are; later ones with an item in whose prompt "poison" stands, as
that of a process which runs out of memory. Each is a process of its own.
"""

import asyncio
import os
import signal
import sys

from doubles import InTestReward, quiet_host
from quartet.v1 import reward_pb2_grpc

from quartet_rollout.scoring import BATCHES


class Mortal(InTestReward):
    """Its process ends with the items whose prompts hold `deadly`."""

    def __init__(self, deadly: str) -> None:
        super().__init__()
        self._deadly = deadly

    def _result(self, item):
        if self._deadly in item.prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._result(item)


async def main(address: str, deadly: str) -> None:
    host = quiet_host("reward", address)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Mortal(deadly), host.server)
    host.capabilities.append(BATCHES)
    await host.start()
    await asyncio.Event().wait()


short_lives = int(sys.argv[2])
while child := os.fork():  # before gRPC has started any thread
    os.waitpid(child, 0)
    short_lives -= 1
asyncio.run(main(sys.argv[1], "" if short_lives > 0 else "poison"))
