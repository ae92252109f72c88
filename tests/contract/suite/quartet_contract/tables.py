"""All cases of the contract."""

from dataclasses import replace

from quartet_contract import (
    cases_broker_prompts,
    cases_broker_results,
    cases_broker_runs,
    cases_broker_training,
    cases_environment,
    cases_handshake,
    cases_reward,
    cases_rollout,
    cases_trainer,
)
from quartet_contract.cases import Case

TABLES = (
    cases_handshake,
    cases_broker_runs,
    cases_broker_prompts,
    cases_broker_training,
    cases_broker_results,
    cases_reward,
    cases_environment,
    cases_rollout,
    cases_trainer,
)
CASES: list[Case] = [replace(case, rpc=rpc) for table in TABLES for rpc, cases in table.CASES.items() for case in cases]


def name_of(case: Case) -> str:
    """Return "Score-one_id_twice": unique among the cases of a service, without spaces."""
    title = "" if not hasattr(case, "title") else case.title.replace(" ", "_")
    return "-".join(filter(None, (case.rpc.partition(".")[2], title)))
