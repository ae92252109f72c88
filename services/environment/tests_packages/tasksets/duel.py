"""Two seats that answer each other in turn, and a referee that no one trains."""

import verifiers.v1 as vf


class DuelConfig(vf.TasksetConfig):
    second_speaks: bool = True


class DuelData(vf.TaskData):
    rounds: int
    second_speaks: bool


class DuelTask(vf.Task[DuelData]):
    pass


class DuelEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness=vf.HarnessConfig(id="null"))
    second: vf.AgentConfig = vf.AgentConfig(harness=vf.HarnessConfig(id="null"))
    referee: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelEnvConfig]):
    async def setup(self, agents):
        agents.referee.trainable = False

    async def run(self, task, agents):
        async with (
            agents.first.interaction(task) as first,
            agents.second.interaction(task) as second,
            agents.referee.interaction(task) as referee,
        ):
            said = "begin"
            for _ in range(task.data.rounds):
                said = (await first.turn(f"first: {said}")).last_reply
                if task.data.second_speaks:
                    said = (await second.turn(f"second: {said}")).last_reply
            await referee.turn("who won?")

    async def finalize(self, task, episode):
        for trace in episode.traces:
            if trace.agent.name != "referee":
                trace.record_reward("won", float(trace.agent.name == "first"))


class DuelTaskset(vf.Taskset[DuelTask, DuelConfig]):
    def load(self):
        yield DuelTask(DuelData(rounds=2, second_speaks=self.config.second_speaks), self.config.task)


__all__ = ["DuelEnv", "DuelTaskset"]
