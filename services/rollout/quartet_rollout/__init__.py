"""The rollout service: generates completions with the live policy, has them scored, uploads finished groups.

__main__     command line
config       [rollout] of the run file
preflight    the checks before a start
app          creates, starts and drains the parts
servicer     the RPCs of RolloutService
sleep        puts the engine to sleep and wakes it
metrics      every Prometheus name
state        state shared by the parts: run, engine, version; an event for changes

membership   member of a run at the broker: register, heartbeat, leave; chooses among several runs
broker       calls to the broker; lease renewal; upload of finished groups
prompts      a Prompt as token ids
generation   sampling parameters and completions of a prompt
groups       leases prompts while the engine has room; the groups in progress, one task each
group        one group: prompt -> completions -> scores -> experience
callbacks    classes in files that are told when a group begins and ends
scoring      one long-lived ScoreStream
experience   GroupTensors, GroupTranscript and GroupHeader of a finished group
direct       Generate and GenerateStream of RolloutService

weight_updates  the state machine of a weight update
engines/        vLLM and transformers behind one Protocol
environments/   answers to the policy's turns
weight_sync/    receives weights: transports, buckets, adapters
"""
