"""The rollout service: generates completions with the live policy, has them scored, uploads finished groups.

__main__     command line
config       [rollout] of the run file
preflight    the checks before a start
app          makes the parts; starts and drains them
servicer     RolloutService: status, weights, sleep
sleep        the engine's sleep, and who ends it
metrics      every Prometheus name
state        what the parts share: run, engine, version, and the event that something changed

membership   member of a run at the broker: register, heartbeat, leave; which run, where there may be several
broker       calls to the broker; leases and their renewal; the upload of finished groups
prompt_loop  leases prompts while there is room
prompts      a Prompt as token ids
generation   the prompt's sampling over the run's; generates
groups       the groups under way, one task each; their leases
group        the life of one group: prompt -> completions -> scores -> experience
scoring      one long-lived ScoreStream
experience   GroupTensors, GroupTranscript and GroupHeader of a finished group
direct       RolloutService: Generate and GenerateStream

weight_updates  the state machine of a weight update
engines/        vLLM and transformers behind one Protocol
environments/   what answers the policy's turns
weight_sync/    transports, buckets and what they hold
"""
