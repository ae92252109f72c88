"""Episodes of agents, which the environment service plays against the model endpoint.

episodes.py  episodes by key, and what each sampled, call by call
rows.py      the calls of an episode as rows of tokens to train on
served.py    completions of a prompt whose environment is served
"""
