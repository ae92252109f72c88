"""The sandbox: runs Python that nobody trusts, and tells how it ended.

`api` is what the rest of the service sees. `docs/sandbox.md` says what each mode promises and by which mechanism.
"""
