"""The model endpoint: vLLM's OpenAI server over the engine, for applications and for the agents of episodes.

gate.py        which requests come in: paths, keys, state of the rollout, load
openai_app.py  vLLM's server, and the recording of what episodes sample
server.py      the HTTP server
"""
