"""How the reward service starts, what it checks before, and how it ends."""

import asyncio
from importlib.util import find_spec
from typing import Any

from quartet.v1 import reward_pb2_grpc

from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.errors import ContractError
from quartet_common.host import ServiceHost
from quartet_common.idleness import Idleness
from quartet_reward.config import RewardSection
from quartet_reward.execution import LANGUAGES, Executor
from quartet_reward.registry import load_verifiers
from quartet_reward.resources import Resources
from quartet_reward.reward_model.config import check as check_reward_model
from quartet_reward.room import Room
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.chosen import check as check_sandbox
from quartet_reward.scoring import Scorer
from quartet_reward.service import RewardServicer
from quartet_reward.specs import SpecReader
from quartet_reward.verifiers.function import RewardFunction

# Of the time to drain: the rest is for telling callers what was not done.
_SHARE_TO_FINISH = 0.7


def preflight(config: LoadedConfig[RewardSection]) -> dict[str, Any]:
    """Check that math-verify is installed and that the run's verifiers exist and take their parameters."""
    if find_spec("math_verify") is None:
        raise ConfigError("the package math-verify is not installed in the reward service's environment")
    verifiers = load_verifiers(load_functions(config))
    specs = SpecReader(verifiers)
    for i, section in enumerate(config.run.verifiers):
        try:
            specs.bind(section.spec_name, section.weight, section.parameters, f"run.verifiers[{i}]")
        except ContractError as error:
            raise ConfigError(error.message) from error
        if section.name == "reward_model" and config.section.reward_model.path is None:
            raise ConfigError(
                f"reward.reward_model.path is missing: run.verifiers[{i}] is 'reward_model', whose Hugging Face folder "
                "it must name"
            )
    check_reward_model(config.section.reward_model)
    plan = {"verifiers": list(verifiers), "workers": config.section.workers}
    if config.section.sandbox.required or any(section.name == "code" for section in config.run.verifiers):
        try:
            plan["sandbox"] = asyncio.run(check_sandbox(config.section.sandbox))
        except SandboxUnavailable as error:
            raise ConfigError(str(error)) from error
    return plan


def load_functions(config: LoadedConfig[RewardSection]) -> list[RewardFunction]:
    """Return the reward functions that the run's verifiers and `reward.functions` name.

    Raises:
        ConfigError: a file or function cannot be used: which, and why.
    """
    named = {one.file: f"run.verifiers[{i}].file" for i, one in enumerate(config.run.verifiers) if one.file}
    named |= {path: f"reward.functions[{i}]" for i, path in enumerate(config.section.functions)}
    return [RewardFunction(path, field, config.section) for path, field in named.items()]


async def serve(config: LoadedConfig[RewardSection], host: ServiceHost) -> None:
    """Serve RewardService until stopped."""
    resources = assemble(config, host)
    await resources.start()
    try:
        await host.run()
    finally:
        await resources.close()


def assemble(config: LoadedConfig[RewardSection], host: ServiceHost) -> Resources:
    """Add RewardService to the host; return what it works with, to be started before the host and closed after it."""
    section = config.section
    functions = load_functions(config)
    resources = Resources.of(section, functions)
    room = Room(section.max_queue)
    verifiers = load_verifiers(functions)
    scorer = Scorer(SpecReader(verifiers), resources.tools)
    offered = {name: verifier for name, verifier in verifiers.items() if resources.serve(name)}
    sandbox = resources.tools.sandbox
    executor = Executor(sandbox, room) if sandbox is not None else None
    servicer = RewardServicer(scorer, offered, room, executor)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, host.server)
    host.capabilities.append("score_stream.batches")
    host.capabilities.extend(f"verifier.{name}" for name in offered)
    if executor is not None:
        host.capabilities.extend(f"execute.{language}" for language in LANGUAGES)

    host.tell_idleness(Idleness(lambda: room.busy_seconds))

    async def finish_or_fail() -> None:
        servicer.draining = True
        try:
            async with asyncio.timeout(_SHARE_TO_FINISH * config.server.drain_seconds):
                await room.wait_empty()
        except TimeoutError:
            await resources.close()  # what is left is answered with FAILURE_KIND_SHUT_DOWN
            await room.wait_empty()

    host.on_drain(finish_or_fail)
    return resources
