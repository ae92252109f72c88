"""The sandbox: runs untrusted Python programs and returns how they ended.

`api` is its interface, `pool.Sandbox` its entry. `docs/sandbox.md` lists what each mode guarantees, and how.
"""
