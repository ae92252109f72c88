"""What the sandbox can run: each module here is imported by the fork server and has `main(payload)`.

`main` is called in the new process, confined, with the job's payload. What it raises ends the process as in any Python
program: SystemExit with its code, MemoryError as MEMORY_EXCEEDED, anything else with a traceback and status 1.
"""
