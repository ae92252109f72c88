"""`quartet-broker [FILE.toml] [--set KEY=VALUE ...]`."""

import sys
from typing import Any

import uvloop

from quartet_broker.config import BrokerSection
from quartet_common.cli import service_main
from quartet_common.config import LoadedConfig


def preflight(config: LoadedConfig[BrokerSection]) -> dict[str, Any]:
    """See `quartet_broker.preflight`."""
    from quartet_broker.preflight import preflight as check

    return check(config)


async def serve(config: LoadedConfig[BrokerSection], host) -> None:
    """Run the service."""
    from quartet_broker.app import serve as serve_broker

    await serve_broker(config, host)


def main() -> int:
    """Return the exit status: 0 ended as asked, 1 failed, 2 unusable configuration, 130 Ctrl-C."""
    return service_main("broker", BrokerSection, preflight, serve, loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
