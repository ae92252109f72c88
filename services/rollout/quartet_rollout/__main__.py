"""`quartet-rollout [FILE.toml] [--set KEY=VALUE ...]`."""

import gc
import logging
import os
import sys


async def serve(config, host) -> None:
    """Run the service, then end the process; grpc and the engine's libraries are imported only now."""
    from quartet_common import tracing
    from quartet_rollout.config import limit_threads

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
    gc.disable()  # until it is ready (freeze_gc_heap)
    from quartet_rollout.config import RolloutSection
    from quartet_rollout.preflight import preflight
    from quartet_server.cli import service_main

    return service_main(kind="rollout", section=RolloutSection, preflight=preflight, serve=serve)


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":  # vLLM's spawned processes import this module, and then vLLM
    gc.set_threshold(100_000)
