"""`quartet-rollout [FILE.toml] [--set KEY=VALUE ...]`."""

import logging
import os
import sys

from quartet_common import tracing
from quartet_common.config import LoadedConfig
from quartet_rollout.config import RolloutSection, limit_threads
from quartet_rollout.preflight import preflight
from quartet_server.cli import service_main


async def serve(config: LoadedConfig[RolloutSection], host) -> None:
    """Run the service, then end the process; grpc and the engine's libraries are imported only now."""
    limit_threads(config.section.engine_options.threads)
    from quartet_rollout.app import RolloutService

    await RolloutService(config, host).run()
    # Everything is drained and closed. A normal exit would wait for the thread of an engine that is still loading, and
    # spend seconds on the teardown of the engine's libraries.
    tracing.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(host.exit_code)


def main() -> int:
    """Return the exit status: 0 stopped normally, 1 failed, 2 invalid configuration, 130 Ctrl-C."""
    return service_main(kind="rollout", section=RolloutSection, preflight=preflight, serve=serve)


# vLLM's spawned processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
