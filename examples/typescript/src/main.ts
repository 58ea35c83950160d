/**
 * Asks a running Quire: two streamed answers, one that is cancelled, one that is too slow, two that are refused.
 *
 *     npm start -- HOST:PORT
 */

import { type ClientReadableStream, credentials, Metadata, type ServiceError, status } from "@grpc/grpc-js";

import { detailsOf } from "./errors.js";
import { FinishReason } from "./generated/quire/v1/generation.js";
import {
  ChatRequest,
  type Finished,
  GenerateRequest,
  type GetInfoResponse,
  TextServiceClient,
} from "./generated/quire/v1/text.js";

/** What Generate and Chat send. */
interface Delta {
  text: string;
  finished?: Finished | undefined;
}

const GREEDY = { temperature: 0 };

/** Prints an answer while it comes. Rejects with the call's status where it ends before its last message. */
async function print(stream: ClientReadableStream<Delta>): Promise<void> {
  for await (const message of stream) {
    const { text, finished } = message as Delta;
    process.stdout.write(text);
    if (finished?.usage) {
      const { promptTokens, completionTokens } = finished.usage;
      const reason = FinishReason[finished.reason];
      console.log(`\n  ${reason}, ${promptTokens} tokens of prompt, ${completionTokens} of answer`);
    }
  }
}

/** The status that ends a stream; undefined where it ends well. */
async function ending(stream: AsyncIterable<unknown>): Promise<ServiceError | undefined> {
  try {
    for await (const _ of stream);
    return undefined;
  } catch (error) {
    return error as ServiceError;
  }
}

function info(client: TextServiceClient): Promise<GetInfoResponse> {
  return new Promise((resolve, reject) => {
    client.getInfo({}, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

/** A completion, urgent, for a tenant, and given up on unless it is there within a minute. */
function complete(client: TextServiceClient): Promise<void> {
  const request = GenerateRequest.fromPartial({
    text: "The capital of France is",
    sampling: GREEDY,
    stopping: { maxTokens: 12 },
    scheduling: { priorityClass: "interactive", tenant: "acme", ttftTargetMs: 500 },
  });
  return print(client.generate(request, new Metadata(), { deadline: Date.now() + 60_000 }));
}

/** An answer to a conversation, as work that may wait. */
function chat(client: TextServiceClient): Promise<void> {
  const request = ChatRequest.fromPartial({
    messages: [{ role: "user", content: "What is the capital of France?" }],
    sampling: GREEDY,
    stopping: { maxTokens: 24 },
    scheduling: { priorityClass: "batch", tenant: "acme" },
  });
  return print(client.chat(request));
}

/** A long answer, cancelled after some of it; the server frees what it held at once. */
async function cancel(client: TextServiceClient): Promise<void> {
  const stream = client.generate(
    GenerateRequest.fromPartial({ text: "One, two,", stopping: { maxTokens: 1000, ignoreEos: true } }),
  );
  let messages = 0;
  stream.on("data", () => {
    messages += 1;
    if (messages === 5) stream.cancel();
  });
  const code = await new Promise<status>((resolve) => {
    stream.on("error", (error: ServiceError) => resolve(error.code));
    stream.on("end", () => resolve(status.OK));
  });
  console.log(`  ${status[code]} after ${messages} messages`);
}

/** A long answer that has 300 ms. The deadline of the call would do the same. */
async function expire(client: TextServiceClient): Promise<void> {
  const request = GenerateRequest.fromPartial({
    text: "One, two,",
    stopping: { maxTokens: 1000, ignoreEos: true },
    scheduling: { deadlineMs: 300 },
  });
  const error = await ending(client.generate(request));
  console.log(`  ${error ? status[error.code] : "OK"}`);
}

/** Wrong values: every wrong field is named at once. */
async function wrong(client: TextServiceClient): Promise<void> {
  const request = GenerateRequest.fromPartial({
    text: "Hi",
    sampling: { temperature: -1, topP: 2 },
  });
  const error = await ending(client.generate(request));
  if (!error) throw new Error("it was not refused");
  console.log(`  ${status[error.code]}`);
  for (const [field, description] of detailsOf(error).fields) console.log(`  ${field}: ${description}`);
}

/** A first token wanted sooner than it can be there, or no answer at all: an overload says when to come back. */
async function overloaded(client: TextServiceClient): Promise<void> {
  const request = GenerateRequest.fromPartial({
    text: "One, two, ".repeat(50),
    scheduling: { ttftTargetMs: 1, shedLate: true },
  });
  const error = await ending(client.generate(request));
  if (!error) throw new Error("it was not refused");
  const { reason, retryAfterMs } = detailsOf(error);
  console.log(`  ${status[error.code]}, ${reason}, again in ${retryAfterMs} ms`);
}

async function main(target: string): Promise<void> {
  const client = new TextServiceClient(target, credentials.createInsecure());
  try {
    const { model, maxModelLen } = await info(client);
    console.log(`${model} at ${target}, at most ${maxModelLen ?? "(no worker yet)"} tokens`);
    const parts = { complete, chat, cancel, expire, wrong, overloaded };
    for (const [name, part] of Object.entries(parts)) {
      console.log(`${name}:`);
      await part(client);
    }
  } finally {
    client.close();
  }
}

try {
  await main(process.argv[2] ?? "127.0.0.1:50051");
} catch (error) {
  console.error(String(error).trim());
  process.exitCode = 1;
}
