"""A Python tool: runs the policy's programs and inserts their output.

A turn ends when a block closes:

    ```python                         or    <tool>
    print(21 * 2)                           print(21 * 2)
    ```                                     </tool>

and the answer has the same form: an ```output block, or <result> … </result>. Each program runs by itself in the reward
service's sandbox: without network, files, or variables of earlier programs.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from quartet_rollout.environments.base import Answer, Execution, Parameters, Start, Tools, Turn

_FENCE = "```"
_LANGUAGES = ("python", "python3", "py")
_OPENED, _CLOSED = "<tool>", "</tool>"
_STOPS = {"fence": ("\n```\n",), "tag": (_CLOSED,), "either": ("\n```\n", _CLOSED)}
_LARGEST_PROGRAM = 1 << 20
_GO_ON = Answer("")


class PythonToolParameters(Parameters):
    """Parameters of `python_tool`."""

    calls: Literal["fence", "tag", "either"] = Field(
        "either", description="What is a call: a ```python block, a <tool> element, or both."
    )
    answer_as: Literal["inline", "message"] = Field(
        "inline", description="In the form of the call, in the policy's own turn; or as a message of role `tool`."
    )
    timeout_seconds: float = Field(10.0, ge=0.1, le=600, description="Seconds of a program, by the clock.")
    memory_bytes: int = Field(512 << 20, ge=64 << 20, le=64 << 30, description="Memory of a program.")
    output_bytes: int = Field(16 << 10, ge=1, le=16 << 20, description="Most that a program may print.")


class PythonTool:
    """Runs the policy's programs."""

    name = "python_tool"
    description = "Runs the policy's Python programs in the reward service's sandbox and inserts what they print."
    parameters = PythonToolParameters

    def stop(self, parameters: PythonToolParameters) -> Sequence[str]:
        return _STOPS[parameters.calls]

    def begin(self, start: Start, parameters: PythonToolParameters, tools: Tools) -> "PythonToolEpisode":
        return PythonToolEpisode(start, parameters, tools)


class PythonToolEpisode:
    """One completion's programs."""

    def __init__(self, start: Start, parameters: PythonToolParameters, tools: Tools):
        self._run_id, self._parameters, self._tools = start.run_id, parameters, tools

    async def answer(self, turn: Turn) -> Answer | None:
        """Run the program at the end of the turn. After a closed block without a program the policy continues; without
        a block the completion ends."""
        parameters = self._parameters
        form, program = find_call(turn.text, parameters.calls)
        if program is None:
            return _GO_ON if turn.stop in _STOPS[parameters.calls] else None
        text = await self._run(program)
        if parameters.answer_as == "message":
            return Answer(text, role="tool")
        if form == "tag":
            return Answer(f"\n<result>\n{text}\n</result>\n")
        lead = "" if turn.text.endswith("\n") else "\n"
        return Answer(f"{lead}```output\n{text}\n```\n")

    async def close(self) -> None:
        """Does nothing."""

    async def _run(self, program: str) -> str:
        parameters = self._parameters
        if not program.strip():
            return "[the program is empty]"
        if "\0" in program or len(program.encode()) > _LARGEST_PROGRAM:
            return "[the program is too long or has null characters]"
        execution = await self._tools.execute(
            program,
            timeout_seconds=parameters.timeout_seconds,
            memory_bytes=parameters.memory_bytes,
            output_bytes=parameters.output_bytes,
            run_id=self._run_id,
        )
        return shown(execution, parameters.timeout_seconds)


def find_call(text: str, calls: str) -> tuple[str, str | None]:
    """Return form ("fence" or "tag") and source of the call at the end of a turn; the source is None without a call."""
    text = text.rstrip()
    if calls != "fence" and text.endswith(_CLOSED):
        _, opened, program = text.removesuffix(_CLOSED).rpartition(_OPENED)
        return "tag", program.strip("\n") if opened else None
    if calls != "tag" and text.endswith(_FENCE):
        _, opened, block = text.removesuffix(_FENCE).rpartition(_FENCE)
        language, newline, program = block.partition("\n")
        if opened and newline and language.strip().lower() in _LANGUAGES:
            return "fence", program.rstrip("\n")
    return "fence", None


def shown(execution: Execution, timeout_seconds: float) -> str:
    """Return the text of an execution for the policy: its output, then the error if it failed."""
    parts = [execution.stdout.rstrip("\n")]
    if execution.outcome == "exited" and execution.exit_code:
        parts.append(execution.stderr.rstrip("\n") or f"[exit status {execution.exit_code}]")
    elif execution.outcome == "timed_out":
        parts.append(f"[stopped after {timeout_seconds:g} s]")
    elif execution.outcome != "exited":
        parts.append(f"[stopped: {execution.outcome.replace('_', ' ')}]")
    return "\n".join(part for part in parts if part) or "[no output]"
