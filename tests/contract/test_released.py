"""Old and new together: every RPC of each released contract against the services of today, and today's client against
services that know no more than a release."""

import asyncio

import pytest
from contract_stack import ENGINES
from released_view import RELEASED, ReleasedContract, ReleasedView

from quartet_client import AsyncClient
from quartet_client.contract.calls import OWNERS, RPCS, Caller
from quartet_client.contract.cases import Good
from quartet_client.contract.tables import CASES
from quartet_client.contract.world import World

CONTRACTS = {image.stem: ReleasedContract(image) for image in RELEASED}
# A call that ends a service is made once, by test_rpcs; one whose answer never ends is read there.
OLD_CASES = [case for case in CASES if isinstance(case, Good) and not case.last]


class Views(dict):
    """Callers by service name, each through the eyes of a release; made when first asked for."""

    def __init__(self, stack, contract: ReleasedContract):
        super().__init__()
        self._real = stack.callers(ENGINES[0])
        self._contract = contract
        self._open: list[ReleasedView] = []

    def __missing__(self, name: str) -> Caller:
        view = ReleasedView(self._contract, self._real[name].address)
        self._open.append(view)
        self[name] = Caller(view.address)
        return self[name]

    def close(self) -> None:
        for caller in self.values():
            caller.close()
        for view in self._open:
            view.close()


@pytest.fixture(scope="module")
def views(stack):
    made = {name: Views(stack, contract) for name, contract in CONTRACTS.items()}
    yield made
    for each in made.values():
        each.close()


def test_no_released_rpc_has_gone():
    for contract in CONTRACTS.values():
        assert contract.rpcs <= set(RPCS)


@pytest.mark.parametrize("release", CONTRACTS)
@pytest.mark.parametrize("case", OLD_CASES, ids=lambda case: f"{case.rpc}-{case.title.replace(' ', '_')}")
def test_an_old_client_is_served(stack, views, release, case: Good):
    """What could be said in a release's words is answered in them, and means the same."""
    service = case.rpc.partition(".")[0]
    if case.rpc not in CONTRACTS[release].rpcs:
        return  # newer than this release: nobody who knows no more can call it
    callers = views[release]
    if service == "HandshakeService":
        callers[service] = callers[OWNERS["broker"]]
    weights = stack.weights(ENGINES[0]) if service == "RolloutService" else None
    world = World(callers, weights)
    try:
        request = case.request(world)
        messages = request if isinstance(request, list | tuple) else [request]
        if all(CONTRACTS[release].knows(case.rpc, message) for message in messages):
            case.check(world, world.call(case.rpc, request, take=case.take))
    finally:
        if weights is not None:
            weights.settle(world)


@pytest.mark.parametrize("release", CONTRACTS)
def test_enough_cases_are_in_old_words(stack, release):
    """Else the test above would pass by having nothing to say."""
    contract = CONTRACTS[release]
    told = {case.rpc for case in OLD_CASES if case.rpc in contract.rpcs}
    ends_a_service = {case.rpc for case in CASES if isinstance(case, Good) and case.last}
    assert told | ends_a_service >= contract.rpcs


@pytest.mark.parametrize("release", CONTRACTS)
async def test_todays_client_works_with_old_services(stack, release):
    """Prompts in, results out, runs listed, answers scored, events watched: by services that know only the release."""
    stack.wait_until_loaded(ENGINES[0])
    real = {kind: stack.servers[ENGINES[0] if kind == "rollout" else kind] for kind in OWNERS}
    views = {
        kind: ReleasedView(CONTRACTS[release], await asyncio.to_thread(lambda server=server: server.caller().address))
        for kind, server in real.items()
    }
    try:
        async with AsyncClient(**{kind: view.address for kind, view in views.items()}) as client:
            run_id = f"old-{release}"
            run = await client.create_run(run_id)
            assert run.run_id == run_id and run_id in {each.run_id for each in await client.runs()}
            (handle,) = await client.submit(run_id, "1+1=?")
            assert (await client.place(handle)).state == "queued"
            right, wrong = await client.score(
                [r"\boxed{2}", r"\boxed{3}"], {"prompt": "1+1", "gt_answer": "2"}, ["boxed"]
            )
            assert right.reward > wrong.reward
            assert "boxed" in await client.verifiers()
            states = {service.kind: service.health for service in await client.status()}
            assert states["broker"] == states["reward"] == "serving"
            async with asyncio.timeout(30):
                async for event in client.watch(run_id):
                    assert event
                    break
            assert (await client.finish_run(run_id)).state == "cancelled"
    finally:
        for view in views.values():
            await asyncio.to_thread(view.close)
