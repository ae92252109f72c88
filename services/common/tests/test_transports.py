"""Transports of other packages: what is taken for one, and what is refused with a reason."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
from pydantic import Field

from quartet_common.config import ConfigError
from quartet_server import transports
from quartet_server.transports import TransportParameters, load_transports, transport_names


class PigeonParameters(TransportParameters):
    birds: int = Field(1, ge=1)


class Pigeon:
    name = "pigeon"
    description = "By air."
    parameters = PigeonParameters

    def trainer_end(self, parameters, host, folder):
        """Not called here."""

    def rollout_end(self, info):
        """Not called here."""


Full = type("Full", (Pigeon,), {"name": "full"})


class OneEnd:
    name = "pigeon"
    description = "By air."
    parameters = PigeonParameters


@pytest.fixture
def installed(monkeypatch):
    """Installs a class of this module as the transport of an entry point's name."""

    def install(name: str, kind: str) -> None:
        point = EntryPoint(name, f"{__name__}:{kind}", transports.ENTRY_POINT_GROUP)
        monkeypatch.setattr(transports, "entry_points", lambda group: EntryPoints([point]))

    return install


def test_a_transport_of_a_package_is_named_after_our_own(installed):
    installed("pigeon", "Pigeon")
    assert transport_names() == ["gloo", "nccl", "file", "pigeon"]
    assert isinstance(load_transports()["pigeon"], Pigeon)


@pytest.mark.parametrize(
    "name, kind, why",
    [
        ("full", "Full", "its transport's name 'full' is taken; choose another"),
        ("dove", "Pigeon", "its transport's name is 'pigeon', its entry point's is not; give both one name"),
        ("pigeon", "OneEnd", "no transport: it lacks trainer_end, rollout_end"),
        ("pigeon", "Nothing", "cannot be loaded: AttributeError"),
    ],
)
def test_what_is_no_transport_is_refused_with_a_reason(installed, name, kind, why):
    installed(name, kind)
    with pytest.raises(ConfigError, match=why):
        load_transports()
