"""`quartet doctor`: the service itself is asked, peers are called, certificates read; each trouble has a cure."""

import json
import os
import tempfile
from pathlib import Path

import fake_nvidia_smi
import pytest

from quartet_client import doctor
from quartet_client.authority import create_authority, issue
from quartet_client.cli.main import main
from quartet_common.config import SecuritySection


def script(path: Path, text: str) -> Path:
    """Write a shell script that can be run."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def found(capsys, *arguments: str) -> tuple[int, dict[str, dict]]:
    status = main(["doctor", *arguments, "--json"])
    return status, {each["check"]: each for each in json.loads(capsys.readouterr().out)}


def test_a_missing_program_says_how_to_install_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "find_program", lambda kind: None)
    status, checks = found(capsys, "reward")
    assert status == 1 and checks["program"]["state"] == "failure"
    assert "install.sh reward" in checks["program"]["cure"]
    assert "preflight" not in checks


@pytest.fixture
def section(tmp_path):
    """Issue a certificate of this role for so many days; say what holds it with a key."""
    create_authority(tmp_path)

    def make(role: str = "reward", days: int = 90, key: str = "mine") -> SecuritySection:
        for name in {"mine", key}:
            issue(tmp_path, name, [role], days=days)
        ca, certificate, key_file = (tmp_path / name for name in ("ca.pem", "mine.pem", f"{key}-key.pem"))
        return SecuritySection(tls_ca=ca, tls_certificate=certificate, tls_key=key_file)

    return make


@pytest.mark.parametrize(
    ("given", "host_name", "expected"),
    [
        ({}, "127.0.0.1", {"certificate": "ok"}),
        ({"days": 3}, "127.0.0.1", {"certificate": "warning"}),
        ({"role": "trainer"}, "127.0.0.1", {"certificate": "ok", "role": "failure"}),
        ({}, "gpu9.example", {"certificate": "ok", "host name": "failure"}),
    ],
)
def test_a_certificate_is_read_as_others_will(section, given, host_name, expected):
    findings = doctor.check_security("reward", f"{host_name}:7102", "", section(**given))
    assert {finding.check: finding.state for finding in findings} == expected


def test_a_torn_pair_of_key_and_certificate_is_found(section):
    (finding,) = doctor.check_security("reward", "127.0.0.1:7102", "", section(key="another"))
    assert finding.state == "failure" and "not of one pair" in finding.what


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_key_that_the_services_user_cannot_read_is_found():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # pytest's own are the test user's alone
        key = folder / "tls.key"
        key.write_text("secret")
        key.chmod(0o400)
        service = script(folder / "quartet-reward", f"cat {key} >/dev/null && echo '{{}}'")
        assert doctor.check_preflight(service, None, []).state == "ok"
        finding = doctor.check_preflight(service, None, [], "nobody")
        assert finding.state == "failure" and "Permission denied" in finding.what
        assert doctor.check_user("nobody") is None
        service.chmod(0o700)
        assert "does not start as nobody" in doctor.check_preflight(service, None, [], "nobody").what
    finding = doctor.check_user("no-such-user")
    assert finding is not None and finding.state == "failure" and "--user" in finding.cure


def test_a_folder_that_may_not_be_looked_into_has_the_disk_of_the_one_above(tmp_path):
    assert "free for checkpoints" in doctor.check_disk(tmp_path / ("x" * 300), "checkpoints").what


def torch_of(folder: Path, name: str, answer: dict | None) -> Path:
    """Stands for a service's interpreter with torch: no GPU is here to ask."""
    return script(folder / name, f"echo '{json.dumps(answer)}'" if answer else "exit 1")


CUDA = {"torch": "2.13.0", "cuda": "13.0", "usable": True, "nccl": "2.29.7", "apart": []}


@pytest.mark.parametrize(
    ("driver", "own", "other", "states", "words"),
    [
        ("580.95.05", CUDA, CUDA, {}, "2.29.7, on both ends"),
        ("580.95.05", CUDA, CUDA | {"nccl": "2.28.3"}, {"NCCL": "failure"}, "2.29.7 here, 2.28.3 at the other end"),
        ("580.95.05", CUDA | {"apart": [[0, 1], [1, 0]]}, CUDA, {"peer access": "warning"}, "not between 0-1"),
        ("550.54.14", CUDA, CUDA, {"driver": "warning"}, "is 550.54.14, and CUDA 13.0 needs 580.65.06 or newer"),
    ],
)
def test_gpus_their_driver_and_both_ends_nccl(tmp_path, monkeypatch, driver, own, other, states, words):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, 2, driver)
    pythons = torch_of(tmp_path, "own", own), torch_of(tmp_path, "other", other)
    findings = {finding.check: finding for finding in doctor.check_gpus(*pythons)}
    assert {name: finding.state for name, finding in findings.items() if finding.state != "ok"} == states
    assert f"GPU 1 (NVIDIA H100, 79.0 of 80.0 GiB free); driver {driver}" in findings["GPU"].what
    assert any(words in finding.what for finding in findings.values())
    assert all(finding.cure for finding in findings.values() if finding.state != "ok")
