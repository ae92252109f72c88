"""`quartet-rollout [FILE.toml] [--set KEY=VALUE ...]`."""

import logging
import os
import sys
from typing import NoReturn

from quartet_common.cli import service_main
from quartet_common.config import LoadedConfig
from quartet_rollout.config import RolloutSection, limit_threads, preflight


async def serve(config: LoadedConfig[RolloutSection], host) -> None:
    """Run the service; grpc and the engine's libraries are imported only now, after the thread count is set."""
    limit_threads(config.section.engine_options.threads)
    from quartet_rollout.service import RolloutService

    await RolloutService(config, host).run()


def main() -> NoReturn:
    """End the process with 0: ended as asked, 1: failed, 2: unusable configuration, 130: Ctrl-C."""
    status = service_main(kind="rollout", section=RolloutSection, preflight=preflight, serve=serve)
    # All is drained and closed. The interpreter would now spend seconds collecting what the engine's libraries left.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# vLLM starts processes by spawn, which imports this module again.
if __name__ == "__main__":
    main()
