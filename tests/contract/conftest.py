"""Servers to call, and the order of the tests."""

from collections.abc import Iterator
from contextlib import closing

import pytest

pytest.register_assert_rewrite("quartet_contract")  # before it is imported

from contract_stack import Stack  # noqa: E402

SECONDS = 400  # whichever test comes first waits for all servers


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All servers, started from their own environments; see servers_under_test for having others tested."""
    with closing(Stack(tmp_path_factory.mktemp("contract"))) as made:
        made.start()
        yield made


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_a_service: comes after all other tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))
    items.sort(key=lambda item: item.get_closest_marker("ends_a_service") is not None)
