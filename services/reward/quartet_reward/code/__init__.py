"""Judging programs. `docs/code.md` says how, and what is promised.

In the service: `extract` finds the program in a completion, `tests` reads what the reference gives to test it with,
`stdio` and `judged` run it in the sandbox and find the outcome.

In the two sandboxes of judged execution, with nothing but the standard library: `candidate` holds the program, `judge`
the tests (`assertions`, `function_cases`, `checker`), to which the program is a `program.Program`. They meet in `rpc`,
which makes calls over a `channel`; what crosses it is the plain data of `plain`, and `proxies` for everything else.
"""
