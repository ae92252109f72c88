"""[environment] of the run file. Imports no torch."""

from pydantic import Field

from quartet_common.sections import FunctionPath, Section

LONGEST_EPISODE_SECONDS = 86_400.0


class EnvironmentServiceSection(Section):
    """Environments that are served, and the processes that play their episodes."""

    files: list[FunctionPath] = Field(
        [],
        description='Environments beside the run\'s own: "FILE.py:FUNCTION". Those of packages are served as well: the '
        "ones that the run file names; all if it names none.",
    )
    max_episodes: int = Field(
        2048,
        ge=1,
        le=65_536,
        description="Most episodes at once, those that wait for a process included: one run alone gets half of them, "
        "two a third each; beyond, calls get RESOURCE_EXHAUSTED and come back.",
    )
    workers: int = Field(2, ge=1, le=1024, description="Processes for each environment.")
    episodes_per_worker: int = Field(
        32,
        ge=1,
        le=1024,
        description="Most episodes of one process at once; 1: each has a process to itself, so that none waits for "
        "another that blocks.",
    )
    deadline_seconds: float = Field(
        600.0, gt=0, le=LONGEST_EPISODE_SECONDS, description="Time of an episode whose call sets none."
    )
    hang_seconds: float = Field(
        10.0,
        ge=0.5,
        le=3600,
        description="An agent that blocks its process's event loop for so long has hung: the process is killed.",
    )
    start_seconds: float = Field(120.0, ge=1, le=7200, description="Longest time to load an environment's file.")
    max_tasks: int = Field(1_000_000, ge=1, description="Most tasks of an environment; one that has more is refused.")
