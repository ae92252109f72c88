"""The [broker] section of the run file."""

from pydantic import Field, field_serializer, field_validator

from quartet_broker.redis_url import parse, without_password
from quartet_common.config import Section


class BrokerSection(Section):
    """[broker]: which Redis, and what it may hold for people and results."""

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis 6.2 or later, or Valkey: redis://, unix://, redis+sentinel://host:port,…/master or "
        "redis+cluster://host:port,…; with TLS rediss://, rediss+sentinel://, rediss+cluster://.",
    )
    redis_timeout: float = Field(5.0, gt=0, description="Seconds to wait for an answer of Redis.")
    redis_connections: int = Field(64, ge=2, description="Most connections to a Redis server.")
    max_streams_per_peer: int = Field(
        256, ge=1, description="Most open streams of one peer: watchers, results, batches, audits."
    )
    watcher_patience: float = Field(
        30.0, gt=0, description="Seconds that a watcher may take for a message before its stream is ended."
    )
    redis_replicas: int = Field(
        0, ge=0, description="Replicas that must have a change before the call that made it is answered (WAIT)."
    )
    finished_run_ttl: float = Field(
        0.0, ge=0, description="Seconds after its end at which a run is deleted with all its data; 0: never."
    )
    sweep_interval: float = Field(1.0, gt=0, le=60, description="Seconds between sweeps of expired leases and members.")
    sample_events_per_step: int = Field(2, ge=0, description="Groups per policy version shown as GroupSample events.")
    max_result_bytes: int = Field(
        256 << 20, ge=0, description="Most bytes of transcripts kept to be collected, per run and purpose."
    )
    max_runs: int = Field(10_000, ge=1, description="Most runs, ended ones included, until they are deleted.")
    max_prompt_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="Most bytes of a run's prompts that wait, are under way or dead, and of its evaluation sets; each "
        "counts 1 KiB more. Evaluations under way may take as much again.",
    )
    max_evaluation_bytes: int = Field(
        64 << 20,
        ge=0,
        description="Most bytes of the headers that a run keeps of its evaluations, those under way aside; the oldest "
        "evaluations go first.",
    )
    max_event_bytes: int = Field(
        64 << 20, ge=1 << 20, description="Most bytes of a run's events that are kept; the oldest go first."
    )
    max_members: int = Field(1024, ge=1, le=4096, description="Most live members of a run.")
    max_caller_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Most of a run's prompts and members, and of all runs, that one certificate's holder may have; of "
        "prompts the client that made the run, and its trainer, may have all.",
    )
    any_member_address: bool = Field(
        False, description="Let members register addresses at hosts that their certificates do not name."
    )
    max_first_dead: int = Field(
        20,
        ge=0,
        description="A run of which so many training prompts in a row died of one reason, before any group was stored, "
        "is ended as failed; 0: never.",
    )
    remembered_lives: int = Field(
        10_000, ge=0, description="Settled instances of which a run keeps what happened to them (`quartet trace`)."
    )
    remembered_instances: int = Field(
        1_000_000, ge=1, description="Settled instances a run remembers, to refuse them when they are submitted again."
    )

    @field_validator("redis_url")
    @classmethod
    def _can_be_read(cls, value: str) -> str:
        parse(value)
        return value

    @field_serializer("redis_url", when_used="json")
    def _hide_password(self, value: str) -> str:
        return without_password(value)
