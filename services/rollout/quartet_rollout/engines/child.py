"""The process of a `ProcessHost`: `python -m quartet_rollout.engines.child DESCRIPTOR`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

from quartet_common.log import get_logger
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.runner import Facts, Runner
from quartet_rollout.engines.stepping import Mail
from quartet_rollout.engines.transformers_engine import build
from quartet_rollout.engines.wire import Channel, pack_error, pack_mail, unpack_requests

log = get_logger(__name__)

STATS_SECONDS = 0.02
"""Between two messages that say nothing but what the core is doing."""


class Child:
    """A runner, and the channel over which it is asked and answers."""

    def __init__(self, channel: Channel, order: dict[str, Any]) -> None:
        self._channel = channel
        options = TransformersOptions.model_validate(order["options"])
        make = partial(build, order["model_path"], options)
        self._runner = Runner(order["engine"], make, self._deliver, self._tell)
        self._told: list[Any] = []
        self._told_at = 0.0

    def run(self) -> None:
        """Until the rollout closes it, or is gone."""
        started: Future[Facts] = Future()
        started.add_done_callback(self._say_started)
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        self._runner.run(started)

    def _say_started(self, started: Future[Facts]) -> None:
        if (error := started.exception()) is not None:
            self._channel.send({"failed": pack_error(error)})
        else:
            self._channel.send({"started": asdict(started.result())})

    # ----------------------------------------------------- on the core's thread

    def _deliver(self, mail: list[Mail]) -> None:
        packed, arrays = pack_mail(mail)
        self._send({"mail": packed}, arrays)

    def _answer(self, number: int, done: Future[Any]) -> None:
        if (error := done.exception()) is not None:
            self._send({"answer": number, "failed": pack_error(error)})
        else:
            self._send({"answer": number, "result": done.result()})

    def _tell(self, idle: bool) -> None:
        due = idle or time.monotonic() >= self._told_at + STATS_SECONDS
        if due and [*astuple(self._runner.stats), self._runner.policy_version] != self._told:
            self._send({})

    def _send(self, body: dict[str, Any], arrays: Any = ()) -> None:
        stats, version = astuple(self._runner.stats), self._runner.policy_version
        self._told, self._told_at = [*stats, version], time.monotonic()
        self._channel.send({**body, "stats": stats, "version": version}, arrays)

    # --------------------------------------------------- on the reading thread

    def _read(self) -> None:
        try:
            while True:
                body, arrays = self._channel.receive()
                if "close" in body:
                    self._runner.close()
                    continue
                method, args = body["method"], body["args"]
                if method == "admit":
                    args = [unpack_requests(args, arrays)]
                elif method == "install":
                    from quartet_rollout.engines.arena import tensors_in

                    args[0] = tensors_in(args[0])
                self._runner.ask(method, *args).add_done_callback(partial(self._answer, body["ask"]))
        except (EOFError, OSError):
            os._exit(1)  # The rollout is gone: nobody wants anything any more.
        except Exception:
            log.exception("an order cannot be understood")
            os._exit(1)  # The rollout tells everybody that this process has ended.


class _ToTheRollout(logging.Handler):
    """Log lines leave by the rollout's own log, in its format."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send({"log": [record.name, record.levelno, self.format(record)]})
        except OSError:
            self.handleError(record)


def main(descriptor: int) -> None:
    """Do what the rollout at the other end of the socket asks for."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The rollout drains, then closes this process.
    channel = Channel(descriptor)
    order, _ = channel.receive()
    root = logging.getLogger()
    root.addHandler(_ToTheRollout(channel))
    root.setLevel(order["log_level"])
    Child(channel, order).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Without what torch and vLLM do when an interpreter ends around their threads.
