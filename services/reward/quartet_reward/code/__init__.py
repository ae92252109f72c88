"""Runs programs against tests; see `docs/code.md`.

In the service: `tests` reads the program from a completion and the tests from a reference; `judged` runs both in the
sandbox and returns the outcome.

In the two sandboxes of judged execution, with the standard library only: `candidate` runs the program, `judge` the
tests (`assertions`, `function_cases`), which hold the program as a `program.Program`. They call each other by `rpc`;
`plain` encodes data, and passes proxies for other objects.
"""
