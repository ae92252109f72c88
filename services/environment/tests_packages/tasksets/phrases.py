"""A taskset of one turn: repeat a phrase. What the task's "fault" says goes wrong."""

import asyncio

import verifiers.v1 as vf


class PhraseData(vf.TaskData):
    answer: str
    fault: str = ""


class PhraseTask(vf.Task[PhraseData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fault == "setup":
            raise KeyError("no such row")
        if self.data.fault == "slow":
            await asyncio.sleep(60)

    @vf.reward(weight=1.0)
    async def repeated(self, trace: vf.Trace) -> float:
        if self.data.fault == "reward":
            raise ZeroDivisionError("scored by nothing")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)


class PhraseConfig(vf.TasksetConfig):
    phrases: list[str] = ["ping", "pong"]
    fault: str = ""


class PhraseTaskset(vf.Taskset[PhraseTask, PhraseConfig]):
    def load(self):
        for phrase in self.config.phrases:
            data = PhraseData(prompt=f"Say {phrase}", system_prompt="Repeat.", answer=phrase, fault=self.config.fault)
            yield PhraseTask(data, self.config.task)


__all__ = ["PhraseTaskset"]
