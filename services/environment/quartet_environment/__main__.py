"""`quartet-environment [FILE.toml]`: the environment service."""

import gc
import sys


def main() -> int:
    """Run the environment service; return its exit status."""
    gc.disable()  # until it is ready (freeze_gc_heap)
    from quartet_environment.app import serve
    from quartet_environment.config import EnvironmentServiceSection
    from quartet_environment.preflight import preflight
    from quartet_server.cli import service_main

    return service_main(kind="environment", section=EnvironmentServiceSection, preflight=preflight, serve=serve)


if __name__ == "__main__":
    sys.exit(main())
