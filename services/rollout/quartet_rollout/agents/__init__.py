"""Episodes of agents, which the environment service plays against the model endpoint.

episodes.py  episodes by key, and what each sampled, call by call
rows.py      the calls of an episode as rows of tokens to train on
completions.py  what an episode came to, by seat
experience.py   completions in tensors and transcripts
served.py    completions of a prompt whose environment is served
"""
