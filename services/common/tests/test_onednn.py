"""When oneDNN multiplies, and how many rows."""

import pytest

from quartet_common import onednn
from quartet_common.onednn import ISA, allow_onednn, known_rows


def test_few_shapes_for_many_numbers_of_rows():
    known = {rows: known_rows(rows) for rows in range(16, 4096)}
    assert all(0 <= rows - of_them <= max(15, rows / 16) for rows, of_them in known.items())
    assert len(set(known.values())) <= 16 * 5


@pytest.mark.parametrize(
    ("faster", "before", "allowed", "after"),
    [
        (True, None, True, "AVX512_CORE"),
        (True, "AVX512_CORE", True, "AVX512_CORE"),
        (True, "ALL", False, "ALL"),
        (False, None, False, None),
    ],
)
def test_the_environment_has_its_way(monkeypatch, faster, before, allowed, after):
    monkeypatch.setattr(onednn, "faster", lambda: faster)
    monkeypatch.setenv(ISA, "")
    monkeypatch.delenv(ISA)
    if before is not None:
        monkeypatch.setenv(ISA, before)
    assert allow_onednn() is allowed
    assert onednn.os.environ.get(ISA) == after
