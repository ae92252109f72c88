// Ask the live policy of a run, from Node:
//
//   node ask.js --broker 127.0.0.1:7101 --run arithmetic "2+3+1+2=?" "5-1-1+4=?"
//   node ask.js --rollout 127.0.0.1:7103 "2+3+1+2=?"          straight from the rollout
//
// --ca, --certificate, --key: PEM files for mutual TLS; --token-file: the bearer token. Prints a line of JSON an answer.
// Exit status: 0: all have answers; 1: one is dead, or a call failed; 2: wrong usage.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import { Quartet } from "./quartet.js";

const text = { type: "string" };
const options = { broker: text, rollout: text, run: text, ca: text, certificate: text, key: text, "token-file": text };

async function main() {
  const { values, positionals: prompts } = parseArgs({ options, allowPositionals: true });
  if (!prompts.length || !(values.rollout || (values.broker && values.run))) {
    console.error("usage: node ask.js (--broker HOST:PORT --run ID | --rollout HOST:PORT) PROMPT …");
    return 2;
  }
  const { ca, certificate, key } = values;
  const token = values["token-file"] && readFileSync(values["token-file"], "utf8").trim();
  const client = new Quartet({ broker: values.broker, rollout: values.rollout, tls: { ca, certificate, key }, token });
  let status = 0;
  try {
    if (values.rollout) {
      for (const prompt of prompts) {
        for (const completion of await client.generate(prompt)) console.log(JSON.stringify({ prompt, ...completion }));
      }
      return 0;
    }
    const ids = await client.submit(values.run, prompts);
    for await (const { prompt, completions, dead } of client.results(values.run, ids)) {
      if (dead !== undefined) {
        console.error(`a prompt was set aside: ${dead}`);
        status = 1;
        continue;
      }
      for (const completion of completions) {
        const { text, tokens, score } = completion;
        console.log(JSON.stringify({ prompt, text, tokens, reward: score?.reward, outcome: score?.outcome }));
      }
    }
  } finally {
    client.close();
  }
  return status;
}

main().then(
  (status) => (process.exitCode = status),
  (error) => {
    console.error(`ask.js: ${error.details || error.message}`);
    process.exitCode = 1;
  },
);
