"""`quartet-reward [FILE.toml]`: the reward service."""

import gc
import sys


async def serve(config, host) -> None:
    """Run the service; grpc is imported only now, as a dry run does not need it."""
    from quartet_reward import app

    await app.serve(config, host)


def main() -> int:
    """Run the reward service; return its exit status."""
    gc.disable()  # until it is ready (freeze_gc_heap)
    from quartet_reward.config import RewardSection
    from quartet_reward.preflight import preflight
    from quartet_server.cli import service_main

    return service_main(kind="reward", section=RewardSection, preflight=preflight, serve=serve)


if __name__ == "__main__":
    sys.exit(main())
