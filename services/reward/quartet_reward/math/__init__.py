"""Equality of mathematical answers.

`extract` finds the answer in a completion; `notation` normalizes its spelling, `forms` parses its structure. `fast` and
`compare` decide plain cases exactly in the service's process, a killable `worker` process decides the others.
`equality` is the interface for verifiers; it caches the workers' verdicts.
"""
