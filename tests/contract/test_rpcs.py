"""Every RPC of the contract over a real socket, with good and with bad input: the cases of quartet_contract."""

import pytest
from contract_stack import ENGINES

from quartet_contract.calls import OWNERS, RPCS
from quartet_contract.cases import Bad, Good, NoBadInput, Refused, Tried
from quartet_contract.judge import judge
from quartet_contract.tables import CASES, name_of
from quartet_contract.world import World


def places(case: Tried) -> list[str]:
    """Where a case is tried: at each kind of server, with each engine, or at the one server there is."""
    service = case.rpc.partition(".")[0]
    if service == "HandshakeService":
        return list(OWNERS)
    if service == "RolloutService":
        return list(ENGINES) if isinstance(case, Good) else list(ENGINES[:1])
    return [""]


PLACED = [
    pytest.param(
        case,
        place,
        id="-".join(filter(None, (name_of(case), place))),
        marks=[pytest.mark.ends_a_service] if isinstance(case, Good) and case.last else [],
    )
    for case in CASES
    if not isinstance(case, NoBadInput)
    for place in places(case)
]


@pytest.fixture
def world(stack, place, case):
    """Return the case's world; what it left open at a rollout is closed behind it."""
    service = case.rpc.partition(".")[0]
    engine = place if place in ENGINES else ENGINES[0]
    callers = stack.callers(engine)
    if service == "HandshakeService":
        callers[service] = callers[OWNERS[place]]
        if place == "rollout":  # what it can do depends on its engine
            stack.wait_until_loaded(engine)
    weights = stack.weights(engine) if service == "RolloutService" else None
    world = World(callers, weights)
    yield world
    if weights is not None:
        weights.settle(world)


@pytest.mark.parametrize(("case", "place"), PLACED)
def test_a_case_of_the_contract(stack, world, case: Tried, place):
    judge(world, case)
    if isinstance(case, Good) and case.last:
        assert stack.servers["trainer"].wait(60) == 0


@pytest.mark.parametrize("rpc", RPCS)
def test_every_rpc_has_cases(rpc):
    kinds = {type(case) for case in CASES if case.rpc == rpc}
    assert Good in kinds, f"{rpc} has no good case"
    assert kinds & {Bad, Refused, NoBadInput}, f"{rpc} has no bad case, and no NoBadInput that says why"
    assert not (NoBadInput in kinds and kinds & {Bad, Refused}), f"{rpc} has a bad case and says that there is none"
