"""Equality of mathematical answers.

`extract` and `prose` find the answer that a completion states; `notation` gives it one spelling, `forms` takes it
apart. `fast` and `compare` decide plain cases exactly in the service's process; `symbolic` decides the others in a
killable worker process. `equality` is what verifiers call; `verdict_cache` keeps what workers decided.
"""
