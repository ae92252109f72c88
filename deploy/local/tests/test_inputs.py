"""Whatever is wrong with a run's input is one sentence and exit status 2, and nothing is left running."""

import socket

import pytest
from launched import free_ports

pytestmark = pytest.mark.timeout(300)


def refusals(launched) -> list[str]:
    """Return the sentences it ended with, leaving nothing behind."""
    assert launched.wait(90) == 2, launched.text()
    text = launched.text()
    assert "Traceback" not in text
    launched.assert_gone(within=2.0)
    return [line for line in text.splitlines() if not line.startswith("checking")]


def test_ports_that_are_taken_and_a_redis_of_the_users_that_does_not_answer(launch, run_file):
    (nowhere,) = free_ports(1)
    settings = [f"broker.redis_url=redis://127.0.0.1:{nowhere}/0"]
    expected = {"redis_url": nowhere}
    with socket.socket() as one, socket.socket() as other:
        for service, taken in (("broker", one), ("trainer", other)):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            expected[f"addresses.{service}"] = taken.getsockname()[1]
            settings.append(f"addresses.{service}=127.0.0.1:{taken.getsockname()[1]}")
        sentences = refusals(launch(run_file, *(word for setting in settings for word in ("--set", setting))))
    assert len(sentences) == len(expected), sentences
    for (key, port), sentence in zip(expected.items(), sentences, strict=True):
        assert key in sentence and str(port) in sentence
