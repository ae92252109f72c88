"""What `quartet contract-test` has pytest run; `suite` gives the cases and the bench."""

import grpc
import pytest

from quartet_common.text import one_line, visible
from quartet_contract.cases import Bad, Tried
from quartet_contract.judge import judge
from quartet_contract.target import Bench
from quartet_contract.world import NotHere


def test_case(bench: Bench, case: Tried) -> None:
    came = judged(bench, case)
    if came:
        asked = f"refused with {case.code.name}, naming '{case.names}'" if isinstance(case, Bad) else "answered"
        pytest.fail(f"{case.rpc}, tried: {case.title}\n  asked for: {asked}\n  came: {visible(came)}", pytrace=False)


def judged(bench: Bench, case: Tried) -> str:
    """Return what came that should not have; empty if nothing did."""
    try:
        with bench.world(case) as world:
            judge(world, case)
    except NotHere as reason:
        pytest.skip(one_line(str(reason)))
    except AssertionError as error:
        return str(error) or "an answer that is not what the contract says"
    except grpc.RpcError as error:
        return f"a call was refused with {error.code().name}: {error.details()}"
    return ""
