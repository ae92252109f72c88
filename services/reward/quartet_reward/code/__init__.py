"""Judging programs. `docs/code.md` says how, and what is promised.

In the service: `extraction` finds the program in a completion, `tests` reads what the reference gives to test it with,
`standard_io` and `judged` run it in the sandbox and find the outcome, `text` compares what it printed.

In the two sandboxes of judged execution, with nothing but the standard library: `candidate_side` holds the program,
`judge_side` the tests (`assert_programs`, `function_cases`, `special_judge`). They meet in `peer`, which makes calls
over a `channel`; what crosses it is the plain data of `plain`, and `handles` that stand for everything else.
`shared_judge` stays from one judgment to the next, for the tests that `data_tests` finds to leave nothing behind.
"""
