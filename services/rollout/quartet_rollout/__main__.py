"""`quartet-rollout [FILE.toml] [--set KEY=VALUE ...]`."""

import gc
import logging
import os
import sys


def prepare(config) -> None:
    """Let the engine fork its process while this one has no threads."""
    from quartet_rollout.config import limit_threads
    from quartet_rollout.engines.registry import prepare_engine

    limit_threads(config.section.engine_options.threads)
    prepare_engine(config.section.engine, str(config.model.path), config.section.engine_options)


async def serve(config, host) -> None:
    """Run the service, then end the process; grpc and the engine's libraries are imported only now."""
    from quartet_common import tracing
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
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts its threads when it is imported
    from quartet_rollout.config import RolloutSection
    from quartet_rollout.preflight import preflight
    from quartet_server.cli import service_main

    return service_main(kind="rollout", section=RolloutSection, preflight=preflight, serve=serve, prepare=prepare)


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":  # vLLM's spawned processes import this module, and then vLLM
    gc.set_threshold(100_000)
