"""[rollout] of the run file. Imports neither torch nor an engine."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator, model_validator

from quartet_common.config import Address, ConfigError, read_text
from quartet_common.sections import FunctionPath, Section
from quartet_common.values import is_http_url
from quartet_rollout.engines.options import EngineParameters, TransformersOptions, VllmOptions
from quartet_rollout.engines.registry import engine_names, load_plugin
from quartet_server.plugins import read_parameters

OWN_ENGINES = ("vllm", "transformers")


class ScoringSection(Section):
    """[rollout.scoring]: retries and deadline of verifications by the reward service."""

    attempts: int = Field(
        7, ge=1, description="Verifications of one completion before its group is set aside, with its completions."
    )
    backoff_seconds: float = Field(0.2, gt=0, description="Wait before the second attempt; doubles with each further.")
    timeout_seconds: float = Field(300.0, gt=0, description="Longest wait for one completion's score, per attempt.")


class HttpSection(Section):
    """[rollout.http]: the model endpoint, vLLM's OpenAI server over the policy. Off without an address."""

    address: Address = Field("", description="host:port to listen on. Default: none, there is no endpoint.")
    url: str = Field(
        "", description='How the environment service reaches it, "http://host:port". Default: from `address`.'
    )
    model: str = Field("policy", min_length=1, description="The model's name in requests.")
    keys_file: Path | None = Field(
        None,
        description="File with the API keys of applications, one per line; their calls use the live policy and are not "
        "recorded. Default: none, only episodes have keys.",
    )
    max_tokens: int = Field(4096, ge=1, description="Most tokens of one call; a longer answer ends there.")
    tool_call_parser: str = Field("", description="vLLM's parser of tool calls, e.g. hermes. Default: none.")
    reasoning_parser: str = Field("", description="vLLM's parser of reasoning, e.g. qwen3. Default: none.")

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        if value and not is_http_url(value):
            raise ValueError('got no address of HTTP; allowed: "http://host:port" or "https://host:port"')
        return value.rstrip("/").removesuffix("/v1")

    def api_keys(self) -> list[str]:
        """Return the keys of applications. Raises ConfigError if the file cannot be used."""
        if self.keys_file is None:
            return []
        keys = read_text(self.keys_file, "rollout.http.keys_file").split()
        if not keys:
            raise ConfigError(f"rollout.http.keys_file: '{self.keys_file}' is empty; it must hold a key per line")
        return keys


class RolloutSection(Section):
    """[rollout]: the engine, its load limits, and the calls to other services."""

    engine: str = Field(
        "vllm", description="What generates: vllm, transformers, or an engine that an installed package brings."
    )
    vllm: VllmOptions = Field(VllmOptions(), description="Options of the vllm engine.")
    transformers: TransformersOptions = Field(TransformersOptions(), description="Options of the transformers engine.")
    engine_parameters: dict[str, Any] = Field({}, description="Parameters of an engine of another package.")
    environments: list[FunctionPath] = Field(
        [], description='Environments in files beside that of the run: "FILE.py:CLASS".'
    )
    callbacks: list[FunctionPath] = Field(
        [], description='Subclasses of `quartet_rollout.callbacks.Callback` in files: "FILE.py:CLASS".'
    )
    runs: list[Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9._*?!\[\]-]{1,64}$")]] = Field(
        [],
        max_length=32,  # the broker takes members of at most 4 KiB, and each publishes its patterns
        description="Runs it may work for, one at a time: at most 32 names, or patterns such as 'team-*'. "
        "Default: only run.id.",
    )
    advertise_address: Address = Field(
        "", description="host:port under which peers reach this rollout; default: addresses.rollout."
    )
    max_running_completions: int = Field(
        256, ge=1, description="Completions given to the engine at once; prompts are leased while there is room."
    )
    max_unsettled_completions: int = Field(
        1024, ge=1, description="Completions in progress in all: generating, being scored, being uploaded."
    )
    max_waiting_completions: int = Field(
        64, ge=0, description="No prompt is leased while more completions than this wait inside the engine."
    )
    kv_cache_limit: float = Field(
        0.95, gt=0, le=1, description="No prompt is leased while more than this fraction of the KV cache is in use."
    )
    lease_wait_seconds: float = Field(
        1.0, gt=0, le=30, description="How long one request for prompts waits at the broker."
    )
    max_direct_completions: int = Field(
        64,
        ge=0,
        description="Completions of Generate and LogProbs at the same time, at most a quarter of the window unless "
        "standalone; 0 disables them.",
    )
    max_direct_queued: int = Field(
        256, ge=0, description="Those of them that may wait for admission; further requests are rejected."
    )
    initial_version: int | None = Field(
        None,
        ge=0,
        description="Policy version of the weights in model.path; prompts are then leased without a trainer. Default: "
        "none; no prompt is leased before a trainer has sent weights.",
    )
    standalone: bool = Field(
        False,
        description="Work for no run: serve the weights of model.path to callers of LogProbs and Generate, as a "
        "teacher (docs/distillation.md).",
    )
    stall_seconds: float | None = Field(
        None,
        gt=0,
        description="An engine that generates no token for so long, with completions under way, has hung: the rollout "
        "gives its prompts back and ends with status 1. Default: ten times the slowest step so far, at least 120.",
    )
    rpc_timeout_seconds: float = Field(30.0, gt=0, description="Deadline of a call to the broker.")
    weight_update_timeout_seconds: float = Field(
        300.0, gt=0, description="Deadline of a weight update, if the trainer sets none."
    )
    weight_interface: str = Field(
        "",
        description="Network interface of weight groups, e.g. eth1: Gloo and NCCL listen only there. Default: that of "
        "the route to the trainer.",
    )
    http: HttpSection = Field(HttpSection(), description="The model endpoint.")
    scoring: ScoringSection = Field(ScoringSection(), description="Scoring by the reward service.")

    @model_validator(mode="after")
    def _engine_is_there(self) -> "RolloutSection":
        if self.engine not in engine_names():
            raise ValueError(f"engine: there is no '{self.engine}' here; allowed: {', '.join(engine_names())}")
        if self.engine in OWN_ENGINES and self.engine_parameters:
            raise ValueError(f"engine_parameters: {self.engine} takes none; its keys are in [rollout.{self.engine}]")
        if self.standalone and self.runs:
            raise ValueError(f"runs: got {self.runs}, and standalone = true works for no run; leave one of them out")
        if self.http.address and self.engine != "vllm":
            raise ValueError(
                f"http.address: the engine '{self.engine}' has no OpenAI server; allowed: engine = \"vllm\""
            )
        _ = self.engine_options
        return self

    @property
    def engine_options(self) -> VllmOptions | TransformersOptions | EngineParameters:
        """The chosen engine's options. Raises ConfigError when an engine of another package cannot be loaded, or does
        not take its parameters."""
        if self.engine in OWN_ENGINES:
            return getattr(self, self.engine)
        return read_parameters(load_plugin(self.engine).parameters, self.engine_parameters, "rollout.engine_parameters")


def limit_threads(threads: int) -> None:
    """Set the thread count of torch's libraries, before they are imported: they read it only then."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # Waiting threads sleep: other processes need the cores.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(threads)
