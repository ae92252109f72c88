"""Equality of mathematical answers.

`extract` finds the answer that a completion states; `notation` gives it one spelling, `forms` takes it apart. `fast`
and `compare` decide plain cases exactly in the service's process, a killable `worker` process decides the others.
`equality` is what verifiers call; it caches what workers decided.
"""
