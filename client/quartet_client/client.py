"""The blocking client: it runs AsyncClient on an event loop in a private thread."""

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import GenericAlias
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from quartet_client.async_client import AsyncClient
from quartet_client.errors import QuartetError
from quartet_common.config import SecuritySection

P = ParamSpec("P")
T = TypeVar("T")


class _LoopThread:
    """The event loop of an AsyncClient, in a daemon thread."""

    def __init__(self, client: AsyncClient) -> None:
        self.closed = False
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, args=[client], name="quartet-client", daemon=True)
        self._thread.start()

    def _serve(self, client: AsyncClient) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its exit cancels all other tasks
            runner.run(self._closing.wait())
            runner.run(client.close())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; an interrupt of the calling thread cancels it.

        Raises QuartetError if the loop is closed, also during the call.
        """
        if self.closed:
            coroutine.close()
        else:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            try:
                return future.result()
            except CancelledError:
                pass
            except BaseException:
                future.cancel()
                raise
        raise QuartetError("the client is closed; make a new one")

    def close(self) -> None:
        """Close the client, cancel what runs on the loop, and end the thread."""
        if self.closed:
            return
        self.closed = True
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=10)


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """Return the blocking form of a coroutine method."""

    @functools.wraps(method)
    def call(self: "Client", *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["Client", P], Iterator[T]]:
    """Return the blocking form of a method that returns an asynchronous generator."""

    @functools.wraps(method)
    def call(self: "Client", *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self._client, *args, **kwargs)
        step: asyncio.Task | None = None

        async def following() -> T:
            nonlocal step
            step = asyncio.current_task()
            return await anext(items)

        async def closing() -> None:
            if step is not None and not step.done():  # an interrupted step must end before its generator can be closed
                step.cancel()
                await asyncio.wait([step])
            await items.aclose()

        try:
            while True:
                try:
                    item = self._thread.run(following())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self._thread.closed:
                self._thread.run(closing())

    signature = inspect.signature(method)
    returned = GenericAlias(Iterator, get_args(signature.return_annotation)[:1])
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


class Client:
    """A connection to Quartet's services, for ordinary programs. Same methods as AsyncClient, blocking.

    Use it as ``with Client("127.0.0.1:7101") as client:``. Any number of threads may share it.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        reward: str | None = None,
        rollout: str | None = None,
        trainer: str | None = None,
        environment: str | None = None,
        security: SecuritySection | None = None,
        timeout: float = 30.0,
    ):
        others = {"reward": reward, "rollout": rollout, "trainer": trainer, "environment": environment}
        self._use(AsyncClient(broker, **others, security=security, timeout=timeout))

    def _use(self, client: AsyncClient) -> None:
        self._client = client
        self._thread = _LoopThread(client)

    @classmethod
    def from_config(cls, path: Path | None = None, overrides: Sequence[str] = (), timeout: float = 30.0) -> "Client":
        """Return a client with the addresses and security of a run file."""
        client = cls.__new__(cls)
        client._use(AsyncClient.from_config(path, overrides, timeout))
        return client

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the private thread. Calls of other threads end with a QuartetError."""
        self._thread.close()

    create_run = _blocking(AsyncClient.create_run)
    get_run = _blocking(AsyncClient.get_run)
    list_runs = _blocking(AsyncClient.list_runs)
    finish_run = _blocking(AsyncClient.finish_run)
    delete_run = _blocking(AsyncClient.delete_run)
    end_prompts = _blocking(AsyncClient.end_prompts)
    submit = _blocking(AsyncClient.submit)
    results = _iterating(AsyncClient.results)
    generate = _blocking(AsyncClient.generate)
    score = _blocking(AsyncClient.score)
    list_verifiers = _blocking(AsyncClient.list_verifiers)
    evaluate = _blocking(AsyncClient.evaluate)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    checkpoint = _blocking(AsyncClient.checkpoint)
    stop = _blocking(AsyncClient.stop)
    drain = _blocking(AsyncClient.drain)
    watch = _iterating(AsyncClient.watch)
    status = _blocking(AsyncClient.status)
    get_service = _blocking(AsyncClient.get_service)
    list_dead = _blocking(AsyncClient.list_dead)
    get_unscored = _blocking(AsyncClient.get_unscored)
    requeue_dead = _blocking(AsyncClient.requeue_dead)
    get_group = _blocking(AsyncClient.get_group)
    get_history = _blocking(AsyncClient.get_history)
