// OpenAI's client for Node.
import OpenAI from "openai";
import { ask, forced, hello, model, refused, tell, tools, url } from "./telling.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const fixed = { model, temperature: 0 };
const counted = { stream: true, stream_options: { include_usage: true } };

function parsed(calls) {
  return (calls ?? []).map((call) => ({ name: call.function.name, arguments: JSON.parse(call.function.arguments) }));
}

function whole({ choices: [{ message, finish_reason: finish }], usage }) {
  const text = message.content ?? "";
  const counts = [usage.prompt_tokens, usage.completion_tokens];
  return { text, reasoning: message.reasoning ?? "", calls: parsed(message.tool_calls), finish, usage: counts };
}

async function streamed(chunks) {
  let [text, reasoning, finish, usage] = ["", "", null, null];
  const calls = [];
  for await (const chunk of chunks) {
    if (chunk.usage) usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens];
    for (const { delta, finish_reason: reason } of chunk.choices) {
      text += delta.content ?? "";
      reasoning += delta.reasoning ?? "";
      finish = reason ?? finish;
      for (const { index, function: part } of delta.tool_calls ?? []) {
        calls[index] ??= { function: { name: "", arguments: "" } };
        calls[index].function.name += part.name ?? "";
        calls[index].function.arguments += part.arguments ?? "";
      }
    }
  }
  return { text, reasoning, calls: parsed(calls), finish, usage };
}

async function chat(check, kind, more) {
  const create = (body) => client.chat.completions.create({ ...fixed, ...more, ...body });
  let question = ask(kind);
  tell(check, question, whole(await create({ messages: question.messages })));
  question = ask(kind);
  tell(`${check}, streamed`, question, await streamed(await create({ messages: question.messages, ...counted })));
}

const named = { type: "function", function: { name: forced.function.name } };
await chat("chat", "recital");
await chat("reasoning", "thinking");
await chat("tools", "calling", { tools });
await chat("reasoning and tools", "both", { tools, tool_choice: "auto" });
await chat("named tool", "forced", { tools: [...tools, forced], tool_choice: named });
await chat("required tool", "forced", { tools: [forced], tool_choice: "required" });

// What the client puts together by itself; of fields that it does not know, reasoning, it keeps the last piece.
let question = ask("both");
const helper = client.chat.completions.stream({ ...fixed, ...counted, messages: question.messages, tools });
const { reasoning: _, ...put } = whole(await helper.finalChatCompletion());
tell("stream helper", question, put);

// The client runs the tools, and sends what they say until the model is content.
question = ask("calling");
const { then } = question;
const runnable = tools.map((tool) => ({ ...tool, function: { ...tool.function, function: () => then, parse: JSON.parse } }));
const runner = client.chat.completions.runTools({ ...fixed, messages: question.messages, tools: runnable });
tell("tool runner", question, { then: await runner.finalContent() });

// The legacy API.
question = ask("recital");
const asked = { ...fixed, max_tokens: 400 };
const completion = await client.completions.create({ ...asked, prompt: question.prompt });
tell("completion", question, { text: completion.choices[0].text, finish: completion.choices[0].finish_reason });
question = ask("recital");
let text = "";
let usage = null;
for await (const chunk of await client.completions.create({ ...asked, ...counted, prompt: question.prompt })) {
  text += chunk.choices.map((choice) => choice.text).join("");
  usage = chunk.usage && [chunk.usage.prompt_tokens, chunk.usage.completion_tokens];
}
tell("completion, streamed", question, { text, usage });

// The newer API.
function response(got) {
  const thought = got.output.filter((item) => item.type === "reasoning").flatMap((item) => item.content ?? []);
  const calls = got.output.filter((item) => item.type === "function_call");
  return {
    text: got.output.flatMap((item) => item.content ?? []).filter((part) => part.type === "output_text").map((part) => part.text).join(""),
    reasoning: thought.map((part) => part.text).join(""),
    calls: calls.map((call) => ({ name: call.name, arguments: JSON.parse(call.arguments) })),
    finish: got.status,
    usage: [got.usage.input_tokens, got.usage.output_tokens],
  };
}

async function responses(check, kind, more) {
  const create = (body) => client.responses.create({ ...fixed, store: false, ...more, ...body });
  let question = ask(kind);
  tell(check, question, response(await create({ input: question.messages })));
  question = ask(kind);
  const events = new Set();
  let last = null;
  for await (const event of await create({ input: question.messages, stream: true })) {
    events.add(event.type);
    last = event.response;
  }
  tell(`${check}, streamed`, question, { ...response(last), events: [...events] });
}

await responses("responses", "recital");
await responses("responses, reasoning and tools", "both", {
  tools: tools.map((tool) => ({ type: "function", ...tool.function })),
});

// Models and errors.
const models = [];
for await (const each of client.models.list()) models.push(each.id);
tell("models", null, { models });
for (const stream of [false, true]) {
  const way = stream ? ", streamed" : "";
  const create = (wrong) => () => client.chat.completions.create({ ...fixed, messages: hello(), stream, ...wrong });
  await refused(`unknown model${way}`, create({ model: "nobody" }));
  await refused(`bad parameter${way}`, create({ temperature: -1 }));
}
await refused("embeddings", () => client.embeddings.create({ model, input: "hello" }));

// A stream that is left at its first chunk.
const long = { ...fixed, messages: ask("long").messages, stream: true };
for await (const chunk of await client.chat.completions.create(long)) {
  tell("leaves", null, { choices: chunk.choices.length });
  break;
}
