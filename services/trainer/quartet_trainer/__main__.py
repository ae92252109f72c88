"""The command `quartet-trainer`, also `python -m quartet_trainer`."""

import gc
import os
import sys
from functools import partial


async def serve(config, host, *, sft: bool = False) -> None:
    """Run the service; grpc is imported only now, as a dry run does not need it."""
    from quartet_trainer import app

    await (app.serve_sft if sft else app.serve)(config, host)


def main() -> int:
    """Run the trainer from its command line; see `quartet_server.cli.service_main` for the exit status."""
    gc.disable()  # until it is ready (freeze_gc_heap)
    from quartet_server.cli import service_main
    from quartet_trainer.config import TrainerSection
    from quartet_trainer.launch import leave_process
    from quartet_trainer.preflight import preflight, preflight_sft

    arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") != "0":
        arguments += ["--set", "addresses.trainer=127.0.0.1:0"]  # only rank 0 has a server
    status = service_main(
        "trainer", TrainerSection, preflight, serve, arguments, sft=(preflight_sft, partial(serve, sft=True))
    )
    if "torch" in sys.modules:
        # Everything is saved and closed. A daemon thread may still be loading a model or waiting for a socket, and then
        # torch would abort the process when the interpreter shuts down.
        leave_process(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
