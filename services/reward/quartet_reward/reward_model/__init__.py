"""A learned reward model: a Hugging Face sequence classification model, batched, in a process of its own.

- `config`: `[reward.reward_model]`, and what is checked before the service starts.
- `batching`: texts of many items become batches, runs in turn.
- `process`: how the worker is started and asked. `worker`: the worker; the only module here that imports torch.

The verifier is `quartet_reward.verifiers.reward_model`.
"""
