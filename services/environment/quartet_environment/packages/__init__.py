"""Environments of other packages, as functions that play an episode: each is served where its package is installed.

- `verifiers`: tasksets and environments of the package verifiers, by id. `chat_harness`: what drives the model there.
- `openenv`: environments of OpenEnv's servers, by URL.
"""
