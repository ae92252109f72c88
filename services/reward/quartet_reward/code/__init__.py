"""Judging programs. `docs/code.md` says how, and what is promised.

In the service: `tests` finds the program in a completion and reads what the reference tests it with; `judged` runs it
in the sandbox and finds the outcome.

In the two sandboxes of judged execution, with nothing but the standard library: `candidate` holds the program, `judge`
the tests (`assertions`, `function_cases`), to which the program is a `program.Program`. They call each other by `rpc`;
`plain` encodes the data that crosses, and holds proxies for everything else.
"""
