"""The launcher: Redis and the four services of one run on this machine, each from its own environment.

- `run`: `run(config_path, overrides, plain)`, what `quartet run FILE.toml` calls; the order of things.
- `config`: the [launcher] section.
- `checkout`: where the environments are, and making those that are missing.
- `placement`: the processes of the run: how many, where each listens.
- `preflight`: every service checks its own section before anything starts.
- `redis`: the Redis of the run, the user's or an embedded one.
- `process`: one supervised process and its log. `guard`: what makes sure that nothing of it stays behind.
- `supervisor`: starts them all, waits for health, restarts what dies, stops them in order.
"""
