"""The rollout service: generates completions with the live policy, has them scored, puts finished groups.

__main__     command line
config       [rollout] of the run file
preflight    the checks before a start; chat_templates, prompt_lengths: those of the data
service      puts the parts together; starts and drains them
state        what the parts share: run, engine, version, and the event that something changed

membership   member of the run at the broker: register, heartbeat, leave
prompt_loop  leases prompts while there is room
groups       the groups under way, one task each; their leases
group        the life of one group: prompt -> completions -> scores -> experience
prompts      a Prompt as token ids
sampling     the prompt's sampling over the run's over the defaults
scoring      one long-lived ScoreStream
experience   GroupTensors, GroupTranscript and GroupHeader of a finished group
putting      PutExperience in small batches; ReleaseLeases
leases       renewal of leases

weight_updates  the state machine of a weight update
servicer        RolloutService: status and weights
direct          RolloutService: Generate and GenerateStream
telemetry       Prometheus metrics and the token rate

engines/     vLLM and transformers behind one Protocol
weights/     process groups and buckets
"""
