// Vercel's AI SDK with a conversation of ten calls of a tool, by each of its clients, whole and streamed.
//
// usage: node ai_sdk.mjs URL. Prints a line for each: client, how, "ok" or what went wrong.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "k" });
const models = {
  responses: openai.responses("m"),
  chat: openai.chat("m"),
  compatible: createOpenAICompatible({ name: "x", baseURL, apiKey: "k" })("m"),
  anthropic: createAnthropic({ baseURL, apiKey: "k" })("m"),
};
for (const [name, model] of Object.entries(models)) {
  for (const how of ["whole", "streamed"]) {
    let ran = 0;
    let wrong = "";
    const inputSchema = z.object({ command: z.string() });
    const execute = async () => `${++ran}`;
    const tools = { run: tool({ description: "Runs a command", inputSchema, execute }) };
    const onError = ({ error }) => (wrong = String(error));
    const options = { model, tools, prompt: "go", stopWhen: stepCountIs(15) };
    try {
      const text = how === "whole" ? (await generateText(options)).text : await streamText({ ...options, onError }).text;
      if (ran !== 10 || !text.includes("the tools were run")) wrong ||= `${ran} calls, then ${text}`;
    } catch (error) {
      wrong = String(error);
    }
    console.log([name, how, wrong.slice(0, 150).replaceAll(/\s/g, " ") || "ok"].join("\t"));
  }
}
