"""The contract as a suite: what every RPC must do, as tables of cases, for any implementation of a service.

    quartet contract-test --service reward --target HOST:PORT       (docs/compatibility.md)

| module | has |
|---|---|
| `cases_*` | the tables; they know the protos and nothing of how a service is built |
| `cases` | what a table is made of: `Good`, `Bad`, `Refused`, `NoBadInput` |
| `tables` | all of them, in the order they are tried |
| `world` | what a case is given: the servers, a name of its own, how to arrange a state by calls |
| `calls` | calls by the names in the protos, and what a refusal said |
| `judge` | makes a case's call and judges the answer |
| `target` | somebody's server, as a world |
| `contract_agent` | the environment that the cases of an environment service play |
| `suite`, `implementation` | the above as pytest runs it (the extra `quartet-client[contract]`) |

This repository's own tests (`tests/contract`) use the same tables, against all services together.
"""
