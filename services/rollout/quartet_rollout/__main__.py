"""`quartet-rollout [FILE.toml] [--set KEY=VALUE ...]`."""

import logging
import os
import sys

from quartet_common import tracing
from quartet_common.cli import service_main
from quartet_common.config import LoadedConfig
from quartet_rollout.config import RolloutSection, limit_threads
from quartet_rollout.preflight import preflight


async def serve(config: LoadedConfig[RolloutSection], host) -> None:
    """Run the service, then end the process; grpc and the engine's libraries are imported only now."""
    limit_threads(config.section.engine_options.threads)
    from quartet_rollout.app import RolloutService

    await RolloutService(config, host).run()
    # All is drained and closed. Python would now wait for the thread of an engine that was still loading, and spend
    # seconds collecting what the engine's libraries left.
    tracing.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(host.exit_code)


def main() -> int:
    """Return the exit status: 0 ended as asked, 1 failed, 2 unusable configuration, 130 Ctrl-C."""
    return service_main(kind="rollout", section=RolloutSection, preflight=preflight, serve=serve)


# vLLM starts processes by spawn, which imports this module again.
if __name__ == "__main__":
    sys.exit(main())
