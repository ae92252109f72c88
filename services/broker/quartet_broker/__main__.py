"""`quartet-broker [FILE.toml] [--set KEY=VALUE ...]`."""

import gc
import sys


async def serve(config, host) -> None:
    """Run the service; grpc is imported only now, as a dry run does not need it."""
    from quartet_broker import app

    await app.serve(config, host)


def main() -> int:
    """Return the exit status: 0 ended as asked, 1 failed, 2 unusable configuration, 130 Ctrl-C."""
    gc.disable()  # until it is ready (freeze_gc_heap)
    import uvloop

    from quartet_broker.config import BrokerSection
    from quartet_broker.preflight import preflight
    from quartet_server.cli import service_main

    return service_main("broker", BrokerSection, preflight, serve, loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
