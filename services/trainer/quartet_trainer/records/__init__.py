"""What a run leaves in its folder, and what it tells the broker's stream.

| module | holds |
|---|---|
| `step_metrics` | metrics of a step's batch and of the step's phases, from numpy |
| `journal` | metrics.jsonl and TensorBoard |
| `samples` | readable samples of the batch |
| `rollout_log` | what the policy says, in ColossalChat's form |
| `evaluations` | metrics and JSONL of an evaluation |
| `trace` | trace.json: what the trainer did when, for Perfetto |
| `disk` | an error of the disk as a sentence |
| `reporter` | events to the broker, from a thread of its own, in order |
"""
