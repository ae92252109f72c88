"""Certificates and what a service is told to accept."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from quartet_client.authority import read_info
from quartet_client.doctor.findings import Finding, failure, ok, warning
from quartet_client.errors import InputError
from quartet_common.certificates import read_certificates
from quartet_common.config import ConfigError, SecuritySection, is_loopback, split_address

_SOON_DAYS = 14


def check_security(kind: str, address: str, bind_host: str, security: SecuritySection) -> Iterator[Finding]:
    """Whether the service may listen where it is told to, and whether its certificate will be believed."""
    host = split_address(address)[0]
    listens = bind_host or host
    if not security.tls:
        if is_loopback(listens):
            yield ok("security", f"plaintext on {listens}, which only this host reaches")
        elif security.insecure:
            yield warning("security", f"plaintext on {listens}, open to its network", "use TLS: quartet certs init")
        else:
            yield failure("security", f"plaintext on {listens}, which is not loopback", "use TLS: quartet certs init")
        return
    try:
        read_certificates(security)
        yield from _check_certificate(kind, host, security)
    except (ConfigError, InputError) as error:
        yield failure("certificate", str(error), "make it again: quartet certs issue")


def _check_certificate(kind: str, host: str, security: SecuritySection) -> Iterator[Finding]:
    info = read_info(Path(str(security.tls_certificate)))
    left = info.days_left()
    renew = f"quartet certs renew FOLDER {info.name}"
    if left < 0:
        yield failure("certificate", f"it expired {-left:.0f} days ago", renew)
    elif left < _SOON_DAYS:
        yield warning("certificate", f"it expires in {left:.0f} days", renew)
    else:
        yield ok("certificate", f"good for {left:.0f} days")
    if security.roles and kind not in info.roles:
        roles = ", ".join(info.roles) or "none"
        yield failure("role", f"the certificate's roles are {roles}", f"issue one with --role {kind}")
    elif security.roles and kind not in info.server_roles:
        yield warning("role", "no caller can check it: no name of the certificate says it", renew)
    if not _names(info.hosts, host):
        yield failure(
            "host name",
            f"the certificate is for {', '.join(info.hosts)}, and others call {host}",
            f"issue it with --host {host}",
        )


def _names(hosts: tuple[str, ...], host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        wildcard = "*." + host.partition(".")[2]
        return host in hosts or wildcard in hosts
    return str(address) in hosts
