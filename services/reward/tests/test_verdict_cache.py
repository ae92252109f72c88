"""What is remembered is bounded by bytes; one question is worked on once, until the last who asks gives up."""

import asyncio

import pytest

from quartet_reward.math.equality import VerdictCache


def test_the_least_lately_used_goes_first_and_bytes_are_bounded():
    cache: VerdictCache[int, str] = VerdictCache("test", 100_000)
    for question in range(1000):
        cache.put(question, "verdict", 1000)
        assert cache.bytes <= 100_000
        assert cache.get(0) == "verdict" or question > 0 and len(cache) > 1
    assert cache.get(0) == "verdict" and cache.get(1) is None and cache.get(999) == "verdict"
    assert 30 <= len(cache) <= 50
    cache.put(5000, "too large", 60_000)
    assert cache.get(5000) is None
    for question in range(1000):
        cache.put(question, "verdict", 0)
    assert cache.bytes <= 100_000
    nothing: VerdictCache[int, str] = VerdictCache("test", 0)
    nothing.put(1, "verdict", 0)
    assert len(nothing) == nothing.bytes == 0


class Work:
    """Work that ends when it is told to."""

    def __init__(self):
        self.begun = self.cancelled = 0
        self.end = asyncio.Event()

    async def __call__(self) -> str:
        self.begun += 1
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.begun == 3:
            raise ValueError("it cannot")
        return f"verdict {self.begun}"


async def test_all_who_ask_share_the_work_and_the_last_cancels_it():
    cache: VerdictCache[str, str] = VerdictCache("test", 1000)
    work = Work()
    first, second = (asyncio.create_task(cache.ask("q", work)) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert (work.begun, work.cancelled) == (1, 0) and not second.done()
    second.cancel()
    third = asyncio.create_task(cache.ask("q", work))  # who comes now is not told of the cancellation
    await asyncio.gather(first, second, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert (work.begun, work.cancelled) in ((2, 1), (1, 0))
    work.end.set()
    assert (await third).startswith("verdict")
    work.begun = 2
    for task in [asyncio.create_task(cache.ask("q", work)) for _ in range(2)]:
        with pytest.raises(ValueError, match="it cannot"):
            await task
