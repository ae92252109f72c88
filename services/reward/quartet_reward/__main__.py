"""`quartet-reward [FILE.toml]`: the reward service."""

import sys

from quartet_server.cli import service_main


def main() -> int:
    """Run the reward service; return its exit status."""
    from quartet_reward.app import serve
    from quartet_reward.config import RewardSection
    from quartet_reward.preflight import preflight

    return service_main(kind="reward", section=RewardSection, preflight=preflight, serve=serve)


if __name__ == "__main__":
    sys.exit(main())
