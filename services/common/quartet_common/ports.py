"""TCP ports: free ones for launchers, benchmarks and tests; checks of a service's own ports and of interfaces."""

import random
import socket
from collections.abc import Collection
from pathlib import Path

from quartet_common.config import ConfigError, ServerSection, split_address

_LOWEST, _HIGHEST = 10_000, 65_535
_FEW = 1000
_GIVEN_BY_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: list[socket.socket] = []  # what reserves this process's ports, until it ends


class AddressUnavailable(ConfigError):
    """This host cannot listen at an address now: the port is in use, or the address does not exist, perhaps not yet."""

    exit_code = 1


def reserve_ports(ports: Collection[int]) -> bool:
    """Keep ports from other callers in all processes until this one ends; False if one of them is kept already.

    A launcher reserves what its services will listen on: of several that are started at once, each has its own, and a
    service that is restarted finds its port free. The kernel gives names of abstract sockets to one process each, in
    the scope in which it gives ports, and takes them back at its end.
    """
    made: list[socket.socket] = []
    for port in ports:
        made.append(socket.socket(socket.AF_UNIX))
        try:
            made[-1].bind(f"\0quartet-port-{port}")
        except OSError:
            for each in made:
                each.close()
            return False
    _held.extend(made)
    return True


def free_ports(count: int, host: str = "127.0.0.1", neighbor: int = 0, reserved: Collection[int] = ()) -> list[int]:
    """Return distinct ports that nothing listens on, reserved for this process.

    They are below the kernel's range of ephemeral ports, unless that leaves few: an outgoing connection may take one of
    those before its owner listens on it, and a client that tries to connect to one may connect to itself.

    Args:
        count: how many.
        host: the address to listen on.
        neighbor: offset of a second port that must be free, above each port; 0: none.
        reserved: ports to leave out.

    Raises:
        OSError: fewer than `count` are free.
    """
    first_ephemeral = int(_GIVEN_BY_KERNEL.read_text().split()[0]) if _GIVEN_BY_KERNEL.exists() else 32_768
    if first_ephemeral - neighbor < _LOWEST + _FEW:
        first_ephemeral = 65_536
    candidates = range(_LOWEST, first_ephemeral - neighbor)
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            break
        both = {port, port + neighbor}
        if both.isdisjoint(reserved) and all(_is_free(host, each) for each in both) and reserve_ports(both):
            found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} of {count} ports between {_LOWEST} and {candidates[-1]} are free at {host}")
    return found


def free_port() -> int:
    """Return one of `free_ports`."""
    return free_ports(1)[0]


def _bind(host: str, port: int) -> None:
    """Bind a port and release it. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: old connections do not matter
        probe.bind((host, port))


def _is_free(host: str, port: int) -> bool:
    try:
        _bind(host, port)
    except OSError:
        return False
    return True


def interface_address(key: str, name: str) -> str:
    """Return the first IPv4 address of a network interface, else its first IPv6 address that is not link-local.

    Raises ConfigError, which names `key`, without.
    """
    import psutil  # the services whose keys name interfaces have it

    there: dict[str, str] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for each, addresses in psutil.net_if_addrs().items():
            for address in addresses:
                if address.family == family and not address.address.startswith("fe80:"):
                    there.setdefault(each, address.address)
    if name in there:
        return there[name]
    allowed = ", ".join(f"{each} ({address})" for each, address in there.items())
    raise ConfigError(f"{key}: this host has no network interface '{name}' with an address; allowed: {allowed}")


def address_toward(host: str, port: int) -> str:
    """Return this machine's source address on the route to a host. Sends nothing. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def check_own_host(key: str, host: str) -> None:
    """Raise ConfigError if this host cannot listen at `host`, a name or an address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"{key}: cannot listen on {host}: {(error.strerror or str(error)).lower()}") from error


def ports_of(kind: str, address: str, server: ServerSection) -> dict[str, int]:
    """Return the ports that a service listens on, by the key that sets them; none if the kernel chooses."""
    port = split_address(address)[1]
    if port == 0:
        return {}
    metrics = {"server.metrics_port_offset": port + server.metrics_port_offset} if server.metrics else {}
    return {f"addresses.{kind}": port, **metrics}


def check_ports(kind: str, address: str, server: ServerSection, bind: bool = True) -> None:
    """Raise ConfigError for an invalid metrics port; with `bind` AddressUnavailable if a port cannot be bound."""
    host = server.bind_host or split_address(address)[0]
    for key, each in ports_of(kind, address, server).items():
        if each > _HIGHEST:
            raise ConfigError(f"{key}: {each} is no port; ports end at {_HIGHEST}")
        try:
            if bind:
                _bind(host, each)
        except OSError as error:
            raise AddressUnavailable(f"{key}: cannot listen on {host}:{each}: {str(error.strerror).lower()}") from error
