"""A taskset of verifiers 0.4: a game of two turns. The second sum begins with what the policy answered to the first."""

import hashlib
import itertools
import random
import re

import verifiers.v1 as vf


def answered(text: str | None) -> int | None:
    """Return the answer in a reply, if there is one."""
    found = re.search(r"<answer>(-?\d+)</answer>", text or "")
    return int(found[1]) if found else None


class CarryOnConfig(vf.TasksetConfig):
    held_out: bool = False


class CarryOnData(vf.TaskData):
    then: str  # what follows the first answer in the second sum
    totals: list[int]


class CarryOnTask(vf.Task[CarryOnData]):
    @vf.reward(weight=0.5)
    async def first(self, trace: vf.Trace) -> float:
        return float(answered(trace.assistant_messages[0].content) == self.data.totals[0])

    @vf.reward(weight=0.5)
    async def second(self, trace: vf.Trace) -> float:
        return float([answered(one.content) for one in trace.assistant_messages[1:]] == self.data.totals[1:])


class CarryOnTaskset(vf.Taskset[CarryOnTask, CarryOnConfig]):
    def load(self):
        """Yield the sums of four digits, from 1 to 5 as the result is; one in eight is held out."""
        for first in map("".join, itertools.product(*["12345", "+-"] * 3, "12345")):
            total, rest = eval(first), random.Random(first)
            held_out = hashlib.sha256(f"{first}=?".encode()).digest()[0] % 8 == 0
            if total in range(1, 6) and held_out == self.config.held_out:
                then = "".join(rest.choice("+-") + rest.choice("12345") for _ in range(3))
                data = CarryOnData(prompt=f"{first}=?", then=then, totals=[total, total + eval(then)])
                yield CarryOnTask(data, self.config.task)


class CarryOnEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CarryOnEnv(vf.Env[CarryOnEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            said = answered((await game.turn()).last_reply)
            if said in range(1, 6):
                await game.turn(f"{said}{task.data.then}=?")


__all__ = ["CarryOnEnv", "CarryOnTaskset"]
