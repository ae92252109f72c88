// A client of Quartet in Node, which needs only the .proto files: channels, deadlines, tensors and common calls.
// Errors are those of @grpc/grpc-js: `code`, and one sentence in `details`.

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const PROTOS = process.env.QUARTET_PROTOS ?? fileURLToPath(new URL("../../protos", import.meta.url));
const FILES = ["broker", "common", "experience", "reward", "rollout", "tensor", "trainer"];
const LIMIT = 64 << 20; // bytes of a message, as in the services

const definition = loader.loadSync(
  FILES.map((name) => `quartet/v1/${name}.proto`),
  { includeDirs: [PROTOS], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true },
);
const { quartet } = grpc.loadPackageDefinition(definition);
const transcriptType = definition["quartet.v1.GroupTranscript"];

/** Return a channel's credentials: mutual TLS if { ca, certificate, key } name PEM files, else plaintext. */
function credentials({ ca, certificate, key } = {}) {
  if (!ca) return grpc.credentials.createInsecure();
  return grpc.credentials.createSsl(...[ca, key, certificate].map((path) => readFileSync(path)));
}

/** Return a 32-bit tensor of the contract as numbers; throws if dtype or length are wrong. */
export function numbers({ dtype, shape, data }) {
  const kinds = { DTYPE_INT32: "readInt32LE", DTYPE_FLOAT32: "readFloatLE" };
  const read = kinds[dtype];
  if (!read) throw new Error(`dtype ${dtype}: this client reads ${Object.keys(kinds).join(" and ")}`);
  const count = shape.reduce((product, size) => product * size, 1);
  if (data.length !== 4 * count) throw new Error(`a tensor of ${count} numbers came with ${data.length} bytes`);
  return Array.from({ length: count }, (_, index) => data[read](4 * index));
}

/** The services of one deployment. Addresses are host:port; `token` is the bearer token, if services require one. */
export class Quartet {
  constructor({ broker, rollout, tls, token }) {
    const options = { "grpc.max_receive_message_length": LIMIT, "grpc.max_send_message_length": LIMIT };
    const open = (service, address) => address && new quartet.v1[service](address, credentials(tls), options);
    this.channels = { broker: open("BrokerService", broker), rollout: open("RolloutService", rollout) };
    this.metadata = new grpc.Metadata();
    if (token) this.metadata.set("authorization", `Bearer ${token}`);
  }

  /** Make a unary call; `seconds` is its deadline. */
  call(service, method, request, seconds = 30) {
    const channel = this.channels[service];
    if (!channel) return Promise.reject(new Error(`no address of the ${service} was given`));
    return new Promise((resolve, reject) => {
      const done = (error, answer) => (error ? reject(error) : resolve(answer));
      channel[method](request, this.metadata, { deadline: Date.now() + 1000 * seconds }, done);
    });
  }

  /** Queue prompts (texts) in a run, and return their instance ids. They have priority and are never trained on. */
  async submit(runId, texts) {
    const instances = texts.map((text) => {
      const id = randomUUID();
      return { instance_id: id, purpose: "PURPOSE_SERVE", prompt: { prompt_id: id, text } };
    });
    await this.call("broker", "SubmitPrompts", { run_id: runId, instances });
    return instances.map((instance) => instance.instance_id);
  }

  /** Yield { id, prompt, completions } of each instance when it is finished, or { id, dead } with the reasons. */
  async *results(runId, ids, seconds = 120) {
    const request = { run_id: runId, instance_ids: ids };
    const options = { deadline: Date.now() + 1000 * seconds };
    const stream = this.channels.broker.CollectResults(request, this.metadata, options);
    for await (const message of stream) {
      if (message.result === "dead") yield { id: message.instance_id, dead: message.dead.reason };
      else {
        const transcript = transcriptType.deserialize(message.transcript);
        yield { id: message.instance_id, prompt: transcript.prompt_text, completions: transcript.completions };
      }
    }
  }

  /** Complete a text with the current weights: [{ text, tokens, logProbs }]. Not scored, not stored. */
  async generate(text, { n = 1, maxNewTokens = 32, seed } = {}) {
    const sampling = { n, temperature: 1, max_new_tokens: maxNewTokens, ...(seed === undefined ? {} : { seed }) };
    const answer = await this.call("rollout", "Generate", { prompt: { text, sampling } }, 120);
    return answer.completions.map(({ info, token_ids, log_probs }) => ({
      text: info.text,
      policyVersion: info.version_spans[0]?.policy_version,
      tokens: numbers(token_ids),
      logProbs: numbers(log_probs),
    }));
  }

  close() {
    for (const channel of Object.values(this.channels)) channel?.close();
  }
}
