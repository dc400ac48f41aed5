// Asks for a snapshot every second and shows it; the keys, the forms and the admin key.

import { h, visible } from "./draw.js";
import { batches } from "./batches.js";
import { keepBudgets } from "./budgets.js";
import { keepFile } from "./file.js";
import { keys } from "./keys.js";
import { showUsage } from "./usage.js";
import * as panels from "./panels.js";

const EVERY_MS = 1000;
const MOST_KEPT = 500;
const KEY = "pointsman-admin-key";
const find = (selector) => document.querySelector(selector);

let now = null;
let revision = 0;
let chosen = null;
let isPaused = false;
let decisions = new Map();
let listed = [];

/** The answer of `path`, parsed if it is JSON. Sends `body` as JSON or `text` as it is, and `expected` as If-Match.
 * Throws the router's error message; without a valid key or token it asks the user for one first. */
async function ask(path, { method = "GET", body = null, text = null, expected = null } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(expected && { "If-Match": `"${expected}"` }) };
  const reply = await fetch(path, { method, headers, body: text ?? (body && JSON.stringify(body)) });
  const answer = reply.headers.get("Content-Type")?.startsWith("application/json") ? await reply.json() : await reply.text();
  document.body.dataset.role = reply.headers.get("X-Operator-Role") ?? "";
  if (reply.headers.has("WWW-Authenticate")) {
    await keyTyped(key ? answer.error.message.replace(` (${answer.error.hint})`, "") : "");
    return ask(path, { method, body, text, expected });
  }
  if (!reply.ok) throw new Error(visible(answer.error.message));
  return answer;
}

let typing = null;

function keyTyped(wrong) {
  typing ??= new Promise((resolve) => {
    if (wrong) find("#key-why").textContent = `✕ ${wrong}`;
    find("#key-form").onsubmit = () => {
      sessionStorage.setItem(KEY, find("#key").value);
      find("#key").value = "";
      typing = null;
      resolve();
    };
    const dialog = find("#key-dialog");
    dialog.oncancel = (event) => event.preventDefault();
    if (!dialog.open) dialog.showModal();
  });
  return typing;
}

function trouble(text) {
  find("#trouble").hidden = !text;
  find("#trouble").textContent = text;
}

async function refresh() {
  const snapshot = await ask(`/admin/snapshot?since=${revision}`);
  if (now && snapshot.up_s < now.up_s) {
    // the router was restarted: its numbers begin anew
    decisions = new Map();
    chosen = null;
  }
  now = snapshot;
  revision = now.revision;
  for (const decision of now.decisions) decisions.set(decision.number, decision);
  if (decisions.size > MOST_KEPT) {
    decisions = new Map([...decisions].sort(([a], [b]) => a - b).slice(-MOST_KEPT));
  }
  find("#state").textContent = `${now.is_ready ? "✓ ready" : "✕ not ready"} · file ${now.config_version}` +
    `${now.shadow_version ? ` · shadow ${now.shadow_version}` : ""} · up ${upFor(now.up_s)} · ${document.body.dataset.role}`;
  for (const panel of ["tiles", "classes", "tenants", "prefixes", "splits", "mirrors", "options"]) panels[panel](now);
  batches(now);
  keys(now, ask);
  panels.backends(now, change);
  if (!isPaused) listed = [...decisions.values()].sort((a, b) => b.number - a.number);
  list();
  trouble("");
  document.documentElement.dataset.shown = now.at;
}

const upFor = (s) => (s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

const list = () => panels.stream(listed, find("#filter").value, chosen, choose);

async function keepRefreshing() {
  try {
    if (!document.hidden) await refresh();
  } catch (error) {
    trouble(error instanceof TypeError ? "✕ The router does not answer. What is shown is its last word." : `✕ ${error.message}`);
  }
  setTimeout(keepRefreshing, EVERY_MS);
}

async function change(name, wanted) {
  try {
    await ask(`/admin/backends/${encodeURIComponent(name)}`, { method: "PATCH", body: wanted });
    await refresh();
  } catch (error) {
    trouble(`✕ ${error.message}`);
  }
}

async function choose(number) {
  chosen = number;
  list();
  try {
    panels.detail(await ask(`/admin/decisions/${number}`), now.backends);
    // on a phone it stands below the list
    find("#detail").scrollIntoView({ block: "nearest" });
  } catch (error) {
    find("#detail-body").replaceChildren(h("p", { class: "error" }, `✕ ${error.message}`));
  }
}

function move(step) {
  const rows = [...find("#stream tbody").children];
  const from = rows.findIndex((row) => row.dataset.key === String(chosen));
  const row = rows[from < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, from + step))];
  if (!row) return;
  choose(Number(row.dataset.key));
  row.focus();
  row.scrollIntoView({ block: "nearest" });
}

function pause() {
  isPaused = !isPaused;
  find("#pause").setAttribute("aria-pressed", isPaused);
  find("#pause").textContent = isPaused ? "paused" : "pause";
}

function theme(next) {
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  localStorage.setItem("pointsman-theme", next);
  find("#theme").textContent = `theme: ${next}`;
}

const nextTheme = () => theme({ system: "light", light: "dark", dark: "system" }[localStorage.getItem("pointsman-theme")] ?? "light");

const held = (text) => Object.fromEntries(text.split(/[\s,]+/).filter(Boolean).map((pair) => pair.split("=")).map(([name, value]) => [name, value ?? ""]));

async function explain(event) {
  event.preventDefault();
  const form = new FormData(find("#explain"));
  const body = { ...Object.fromEntries(form), held_tokens: held(form.get("held_tokens")), live: form.get("live") === "on" };
  for (const name of ["priority", "session", "model"]) body[name] ||= null;
  try {
    panels.explained(await ask("/admin/explain", { method: "POST", body }));
  } catch (error) {
    find("#explained").replaceChildren(h("p", { class: "error" }, `✕ ${error.message}`));
  }
}

async function diagnose() {
  try {
    panels.diagnosed(await ask("/admin/diagnosis"));
  } catch (error) {
    find("#diagnosed").replaceChildren(h("p", { class: "error" }, `✕ ${error.message}`));
  }
}

const KEYS = {
  "/": () => find("#filter").focus(),
  p: pause,
  j: () => move(1),
  k: () => move(-1),
  e: () => find("#explain [name=prompt_tokens]").focus(),
  d: diagnose,
  t: nextTheme,
  "?": () => find("#help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea") || find("dialog[open]");
  if (event.key === "Escape" && event.target.matches("input, textarea")) event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const inList = event.target.closest?.("#stream");
  const step = inList && { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const act = step ? () => move(step) : event.key === "Enter" && inList ? () => choose(Number(event.target.dataset.key)) : KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

find("#filter").addEventListener("input", list);
find("#pause").addEventListener("click", pause);
find("#theme").addEventListener("click", nextTheme);
find("#help-button").addEventListener("click", KEYS["?"]);
find("#explain").addEventListener("submit", explain);
find("#diagnose").addEventListener("click", diagnose);
find("#show-usage").addEventListener("click", () => showUsage(ask));
theme(localStorage.getItem("pointsman-theme") ?? "system");
keepRefreshing();
keepBudgets(ask);
keepFile(ask);
