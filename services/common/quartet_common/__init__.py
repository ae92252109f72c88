"""What every Quartet service starts with.

It knows nothing of models, training or Redis, and imports neither torch nor a service.

A service's life, from the top down:

- `cli`: the command line, the same for all four services; calls the service's `preflight` and `serve`.
- `config`: the sections of the run file; `run_file`: the file, overrides, `Problems`; `refusals`: what is wrong with
  a section, TRL's and verl's names for its keys; `run_spec`: the [run] section as the contract's RunSpec.
- `model_folder`, `data_rows`: what a service's checks read of the model and the data; the longest fixed rotary length.
- `hub`: the folder of a model of the Hugging Face hub; `tokenizer_overrides`: one with another tokenizer.
- `host`: the gRPC server: TLS, token, health, reflection, handshake, metrics, drain. `interceptor`: around each call.
- `channel`, `handshake`: how a service reaches another.
- `errors`: statuses with rich details, made by servers, described for people by clients.
- `tensors`, `weights`: the wire form of arrays and of weight updates (numpy and xxhash: the extra `tensors`).
- `wire`: large messages put together from bytes.
- `log`, `metrics`, `durations`, `text`, `process`: small things that all services need.
"""

__version__ = "0.1.0"

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 0
