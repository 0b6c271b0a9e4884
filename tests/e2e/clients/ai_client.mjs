// Vercel's AI SDK, with its providers for what is compatible with OpenAI's API and for OpenAI itself.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ask, forced, hello, model, refused, tell, tools, url } from "./telling.mjs";

const where = { baseURL: `${url}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ name: "nodes", includeUsage: true, supportsStructuredOutputs: true, ...where });
const openai = createOpenAI(where);
const fixed = { model: compatible(model), temperature: 0, maxRetries: 0 };

function described(each, execute) {
  const { name, parameters } = each.function;
  return [name, tool({ inputSchema: jsonSchema(parameters), execute })];
}

const noted = Object.fromEntries(tools.map((each) => described(each)));
const picked = Object.fromEntries([described(forced)]);

function told({ text, reasoningText, toolCalls, finishReason, usage }) {
  const calls = toolCalls.map((call) => ({ name: call.toolName, arguments: call.input }));
  const counts = [usage.inputTokens, usage.outputTokens];
  return { text, reasoning: reasoningText ?? "", calls, finish: finishReason, usage: counts };
}

async function streamed(request) {
  let failed = null;
  const got = streamText({ ...request, onError: ({ error }) => (failed = error) });
  await got.consumeStream();
  if (failed) throw failed;
  const [text, reasoningText, toolCalls, finishReason, usage] = await Promise.all([
    got.text,
    got.reasoningText,
    got.toolCalls,
    got.finishReason,
    got.usage,
  ]);
  return { text, reasoningText, toolCalls, finishReason, usage };
}

async function text(check, kind, more) {
  let question = ask(kind);
  tell(check, question, told(await generateText({ ...fixed, messages: question.messages, ...more })));
  question = ask(kind);
  tell(`${check}, streamed`, question, told(await streamed({ ...fixed, messages: question.messages, ...more })));
}

await text("text", "recital");
await text("reasoning", "thinking");
await text("tools", "calling", { tools: noted });
await text("reasoning and tools", "both", { tools: noted, toolChoice: "auto" });
const named = { type: "tool", toolName: forced.function.name };
await text("named tool", "forced", { tools: { ...noted, ...picked }, toolChoice: named });
await text("required tool", "forced", { tools: picked, toolChoice: "required" });
await text("OpenAI's provider, chat", "recital", { model: openai.chat(model) });
await text("OpenAI's provider, responses", "recital", {
  model: openai.responses(model),
  providerOptions: { openai: { store: false } },
});

// The model calls a tool, the SDK runs it and sends what it says, the model answers.
let question = ask("calling");
const { then } = question;
const run = Object.fromEntries(tools.map((each) => described(each, async () => then)));
const stepped = { ...fixed, messages: question.messages, tools: run, stopWhen: stepCountIs(2) };
tell("two steps", question, { then: (await generateText(stepped)).text });
question = ask("calling");
const ran = Object.fromEntries(tools.map((each) => described(each, async () => question.then)));
const again = { ...fixed, messages: question.messages, tools: ran, stopWhen: stepCountIs(2) };
tell("two steps, streamed", question, { then: (await streamed(again)).text });

// An object.
question = ask("forced");
const output = Output.object({ schema: z.object({ n: z.literal(7) }) });
tell("object", null, { parsed: (await generateText({ ...fixed, messages: question.messages, output })).output.n });

// Errors.
for (const [way, go] of [["", generateText], [", streamed", streamed]]) {
  await refused(`unknown model${way}`, () => go({ ...fixed, messages: hello(), model: compatible("nobody") }));
  await refused(`bad parameter${way}`, () => go({ ...fixed, messages: hello(), temperature: -1 }));
}

// A stream that is left at its first text.
const leaving = new AbortController();
const left = streamText({ ...fixed, messages: ask("long").messages, abortSignal: leaving.signal });
for await (const piece of left.textStream) {
  tell("leaves", null, { some: piece.length > 0 });
  leaving.abort();
  break;
}
