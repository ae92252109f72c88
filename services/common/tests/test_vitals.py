"""What every service exports of itself: its build, its certificate's end, its disks."""

import math
import shutil
import time

import pytest
from certificate_files import make
from prometheus_client import REGISTRY

from quartet_common import certificates
from quartet_common.build import read_build
from quartet_server import vitals

DAY = 86400


def read(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_the_build_is_exported_with_its_version():
    vitals.report_build("reward")
    assert read("quartet_build_info", service="reward", version=read_build()) == 1


def test_certificate_expiry_follows_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "_CHECK_SECONDS", 0.0)
    security = make(tmp_path, "reward", ["localhost"], dates=(0, 90))

    def days() -> float:
        end = read("quartet_certificate_expiry_timestamp_seconds", certificate=str(security.tls_certificate))
        assert end is not None
        return (end - time.time()) / DAY

    vitals.report_certificate(security)
    assert days() == pytest.approx(90, abs=0.1)
    make(tmp_path, "reward", ["localhost"], dates=(0, 10))
    assert days() == pytest.approx(10, abs=0.1)
    make(tmp_path, "reward", ["localhost"], dates=(-20, -10))
    assert days() < -10_000, "one that peers refuse has no time left"


def test_disk_of_a_folder_that_is_not_there_yet_is_measured(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "first"
    vitals.report_disk(folder)
    usage = shutil.disk_usage(tmp_path)
    assert read("quartet_disk_size_bytes", folder=str(folder)) == usage.total
    free = read("quartet_disk_free_bytes", folder=str(folder))
    assert free is not None and 0 < free <= usage.total

    def away(path: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", away)
    assert math.isnan(read("quartet_disk_free_bytes", folder=str(folder)) or 0.0)
