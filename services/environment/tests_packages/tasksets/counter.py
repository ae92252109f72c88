"""A stateful tool of a task, and one that all tasks share."""

import verifiers.v1 as vf
from shared_tool import Shared


class CounterState(vf.State):
    count: int = 0


class Counter(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = "counter"

    @vf.tool
    def bump(self) -> str:
        """Increment the counter."""
        self.state.count += 1
        return f"count={self.state.count}"


class CounterTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CounterTask(vf.Task[vf.TaskData, CounterState, CounterTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Counter(config.tools)]

    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        return float(trace.state.count)

    @vf.reward(weight=0.0)
    async def server(self, trace: vf.Trace) -> float:
        return float(trace.tool_messages[-1].content)


class CounterConfig(vf.TasksetConfig):
    task: CounterTaskConfig = CounterTaskConfig()


class CounterTaskset(vf.Taskset[CounterTask, CounterConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shared(vf.ToolsetConfig())]

    def load(self):
        yield CounterTask(vf.TaskData(prompt="counter_bump counter_bump shared_which"), self.config.task)


__all__ = ["CounterTaskset"]


if __name__ == "__main__":
    Counter.run()
