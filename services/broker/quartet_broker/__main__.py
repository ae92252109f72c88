"""`quartet-broker [FILE.toml] [--set KEY=VALUE ...]`."""

import asyncio
import gc
import sys
from typing import Any


def check(config) -> dict[str, Any]:
    """Check Redis; grpc is imported only now, as `--section-only` does not need it."""
    from quartet_broker.preflight import preflight

    return preflight(config)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop, which a dry run does not import."""
    import uvloop

    return uvloop.new_event_loop()


async def serve(config, host) -> None:
    """Run the service; grpc is imported only now, as a dry run does not need it."""
    from quartet_broker import app

    await app.serve(config, host)


def main() -> int:
    """Return the exit status: 0 ended as asked, 1 failed, 2 unusable configuration, 130 Ctrl-C."""
    gc.disable()  # until it is ready (freeze_gc_heap)
    from quartet_broker.config import BrokerSection
    from quartet_server.cli import service_main

    return service_main("broker", BrokerSection, check, serve, loop_factory=new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
