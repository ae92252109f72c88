"""Whether float32 products are to be oneDNN's, and of which numbers of rows. Imports no torch: the services multiply.

Torch multiplies float32 matrices by MKL, and MKL takes AVX2 on processors that are not Intel's. oneDNN takes what there
is: on a Zen 5 it is twice as fast. Torch gives it float32 products only where they may be rounded to bfloat16
(`torch.backends.mkldnn.matmul.fp32_precision`), and nothing is to be rounded here. So oneDNN is told by its environment
of no instruction that knows bfloat16, whereupon it computes in float32.
"""

import os
import sys
from pathlib import Path

ISA = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_BFLOAT16 = "AVX512_CORE"
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
LEAST_PRODUCT = 1 << 22
"""Multiplications of a product that is worth it: a call of oneDNN takes some 20 µs more than one of MKL."""
LEAST_ROWS = 16


def allow_onednn() -> bool:
    """Keep oneDNN from bfloat16 in this process, if it is faster than MKL here; before its first product.

    False where it is not, and where the environment sets ONEDNN_MAX_CPU_ISA to something else than AVX512_CORE.
    """
    return faster() and os.environ.setdefault(ISA, _WITHOUT_BFLOAT16) == _WITHOUT_BFLOAT16


def faster() -> bool:
    """Whether MKL does not use what the processor can do: AVX-512 of AMD's."""
    if sys.platform != "linux":
        return False
    processor = Path("/proc/cpuinfo").read_text()
    return "AuthenticAMD" in processor and set(processor.split()) >= _AVX512


def known_rows(rows: int) -> int:
    """The largest number up to `rows` of which there are few: 16 between a power of two and the next.

    oneDNN makes a program for each shape that it meets, which takes as long as a small product. Numbers of rows hardly
    ever come again, so it is given numbers that do; the rows that are left are MKL's.
    """
    step = max(LEAST_ROWS, (1 << rows.bit_length()) // 32)
    return rows // step * step
