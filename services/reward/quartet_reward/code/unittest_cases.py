"""Test programs that define `unittest.TestCase` classes."""

import sys
from typing import Any

from quartet_reward.code.report import Finding, Verdict


def run(namespace: dict[str, Any]) -> None:
    """Run the classes that a test program defines; `unittest` has been imported.

    Raises:
        Verdict: a test failed.
    """
    unittest = sys.modules["unittest"]
    cases = [each for each in namespace.values() if isinstance(each, type) and issubclass(each, unittest.TestCase)]
    result = unittest.TestResult()
    result.failfast = True
    for case in cases:
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        if result.wasSuccessful():
            continue
        found = result.failures + result.errors
        test, trace = found[0] if found else (case, "it succeeds where it is expected to fail")
        what = Finding.RAISED if result.errors else Finding.WRONG
        raise Verdict(what, f"{test}: {trace.strip().splitlines()[-1]}")
