"""`quartet-environment [FILE.toml]`: the environment service."""

import sys

from quartet_server.cli import service_main


def main() -> int:
    """Run the environment service; return its exit status."""
    from quartet_environment.app import serve
    from quartet_environment.config import EnvironmentServiceSection
    from quartet_environment.preflight import preflight

    return service_main(kind="environment", section=EnvironmentServiceSection, preflight=preflight, serve=serve)


if __name__ == "__main__":
    sys.exit(main())
