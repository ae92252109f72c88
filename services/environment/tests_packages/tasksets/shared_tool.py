"""A tool server that all tasks of a taskset share."""

import os

import verifiers.v1 as vf


class Shared(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shared"

    @vf.tool
    def which(self) -> str:
        """Return the process that serves this."""
        return str(os.getpid())


if __name__ == "__main__":
    Shared.run()
