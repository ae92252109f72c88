"""The environment service plays episodes of agents against a rollout's model endpoint, and gives their rewards.

From the call down to the agent:

- `app`: assembles, starts and drains the parts. `preflight`: the checks of --dry-run.
- `servicer`: the RPCs. `messages`: what they carry, for the worker and back.
- `environments`: the environments by name, each with its pool.
- `pool`: worker processes; each plays several episodes at once, and is replaced when one of them blocks it.
- `player`: the worker process. `function` calls the agent there, `seats` reads what it returned.

This module is what an agent's file needs: `Task` and `Endpoint` are given to it, `Reward` is what it may return.
"""

from quartet_environment.agent import Endpoint, Reward, Seat, Task  # noqa: F401
