// What the scripts of Node clients share: what they are to ask, from standard input, and one JSON line per check.
import { readFileSync } from "node:fs";

const asked = JSON.parse(readFileSync(0, "utf8"));

export const { url, model, tools, forced } = asked;

// The next question of a kind; no two checks share a prompt.
export function ask(kind) {
  const question = asked.questions[kind].shift();
  if (!question) throw new Error(`no question of kind ${kind} is left`);
  return question;
}

// Print what a check got.
export function tell(check, question, got) {
  console.log(JSON.stringify({ check, question: question?.name ?? null, got }));
}

// Run what a client is to refuse, and print its exception.
export async function refused(check, attempt) {
  try {
    await attempt();
  } catch (error) {
    const status = error.status ?? error.statusCode;
    if (!status) throw error;
    tell(check, null, { error: error.constructor.name, status });
  }
}

// What is asked where the answer does not matter.
export function hello() {
  return [{ role: "user", content: "hello" }];
}
