"""`quartet-broker [FILE.toml] [--set KEY=VALUE ...]`."""

import sys
from typing import Any

import uvloop

from quartet_broker.config import BrokerSection
from quartet_broker.redis_url import without_password
from quartet_common.cli import service_main
from quartet_common.config import LoadedConfig


def preflight(config: LoadedConfig[BrokerSection]) -> dict[str, Any]:
    """Check that Redis answers. Raises ConfigError."""
    from quartet_broker.app import check_redis

    return {"redis": without_password(config.section.redis_url), "redis_version": check_redis(config.section)}


async def serve(config: LoadedConfig[BrokerSection], host) -> None:
    """Run the service."""
    from quartet_broker.app import serve as serve_broker

    await serve_broker(config, host)


def main() -> int:
    """Return the exit status: 0 ended as asked, 1 failed, 2 unusable configuration, 130 Ctrl-C."""
    return service_main("broker", BrokerSection, preflight, serve, loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
