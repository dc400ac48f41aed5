// The panel of the SLA file: drafts are written, compared, applied and taken back.

import { h, row, sync } from "./draw.js";

const EVERY_MS = 5000;
const BASE = "/admin/config";
const find = (selector) => document.querySelector(selector);
const at = (unix) => new Date(unix * 1000).toLocaleString();
const isOwner = () => document.body.dataset.role === "owner";

let ask = null;

/** List drafts and earlier versions every few seconds while the page is seen, if the role may read them. */
export async function keepFile(asks) {
  ask = asks;
  const { role } = document.body.dataset;
  try {
    if (!document.hidden && role) await list(role);
  } catch {
    // the snapshot tells of a router that does not answer
  }
  setTimeout(keepFile, role ? EVERY_MS : 100, asks);
}

async function list(role) {
  const { version, is_file: isFile } = await ask(BASE);
  find("#filed").hidden = !isFile || role === "viewer";
  if (find("#filed").hidden) return;
  const [{ drafts }, { versions }] = await Promise.all([ask(`${BASE}/drafts`), ask(`${BASE}/history`)]);
  const listed = [
    { what: "in effect", version, at: null },
    ...drafts.map((each) => ({ ...each, what: "draft" })),
    ...versions.map((each) => ({ ...each, what: "earlier" })),
  ];
  sync(find("#versions tbody"), listed.map((each) => ({ ...each, isOwner: isOwner() })), (each) => `${each.what}/${each.version}`, () => row(cells));
}

function cells({ what, version, at: time }) {
  const button = (word, act, disabled = false) => h("button", { "aria-label": `${word} ${version}`, disabled, onclick: () => attempt(act) }, word);
  const buttons = {
    "in effect": () => [button("edit", () => edit(`${BASE}/file`))],
    draft: () => [
      button("edit", () => edit(`${BASE}/drafts/${version}/text`)),
      button("compare", async () => shown(await ask(`${BASE}/drafts/${version}`))),
      button("drop", () => drop(version)),
    ],
    earlier: () => [
      button("edit", () => edit(`${BASE}/history/${version}`)),
      button("roll back", () => confirm(`Put version ${version} back?`, (query) => rollBack(version, query)), !isOwner()),
    ],
  }[what]();
  const when = { "in effect": "", draft: `came ${at(time)}`, earlier: `until ${at(time)}` }[what];
  return [h("strong", {}, version), h("span", { class: what === "in effect" ? "good" : null }, what === "in effect" ? "✓ in effect" : what), when,
    h("span", { class: "limits" }, buttons)];
}

async function edit(path) {
  const text = find("#draft-text");
  text.value = await ask(path);
  find("#draft").hidden = false;
  find("#compared").replaceChildren();
  // a new value leaves the cursor at its end, and the beginning out of sight
  text.setSelectionRange(0, 0);
  text.scrollTo(0, 0);
  text.focus();
}

async function compare(event) {
  event.preventDefault();
  await attempt(async () => shown(await ask(`${BASE}/drafts`, { method: "POST", text: find("#draft-text").value })));
  await list(document.body.dataset.role);
}

async function drop(version) {
  await ask(`${BASE}/drafts/${version}`, { method: "DELETE" });
  find("#compared").replaceChildren();
  await list(document.body.dataset.role);
}

const apply = ({ version, base }, query) => ask(`${BASE}/drafts/${version}/apply${query}`, { method: "POST", expected: base });

const rollBack = (version, query) => ask(`${BASE}/rollback${query}`, { method: "POST", body: { version } });

/** Have `act` change the file once the operator agrees. It gets the query of the call. */
function confirm(title, act) {
  find("#into-effect-title").textContent = title;
  find("#for-restart").checked = false;
  find("#into-effect-form").onsubmit = (event) => {
    if (event.submitter?.value === "write") attempt(() => written(act));
  };
  find("#into-effect").showModal();
}

async function written(act) {
  const done = await act(find("#for-restart").checked ? "?restart=true" : "");
  const what = done.in_effect ? "is in effect" : "is in the file and takes effect at the next start";
  find("#file-done").textContent = `✓ version ${done.version} ${what}; ${done.before} before`;
  find("#draft").hidden = true;
  find("#compared").replaceChildren();
  await list(document.body.dataset.role);
}

/** Show how a draft differs, or its mistakes. */
function shown(report) {
  const { version, problems } = report;
  const title = problems.length
    ? h("p", { class: "error" }, `✕ draft ${version} has ${problems.length === 1 ? "1 mistake" : `${problems.length} mistakes`}`)
    : h("p", {}, h("strong", {}, `✓ draft ${version} is sound`), `; version ${report.running} is in effect`);
  const parts = problems.length ? [["mistakes", problems]] : differences(report);
  const lists = parts.filter(([, lines]) => lines.length).map(([name, lines]) => [h("h3", {}, name), h("ul", {}, lines.map((line) => h("li", {}, line)))]);
  const use = problems.length ? "" : h("button", { type: "button", disabled: !isOwner(), "aria-label": `apply ${version}`,
    onclick: () => confirm(`Put draft ${version} into effect?`, (query) => apply(report, query)) }, "Apply");
  find("#compared").replaceChildren(title, ...lists.flat(), use);
}

function differences({ changes, warnings, restart, backends, decisions }) {
  const named = [["new", backends.start], ["replaced", backends.are_replaced], ["leaving", backends.leave]];
  return [
    ["Changes", changes.length ? changes : ["none in meaning"]],
    ["Warnings", warnings],
    ["Take effect at the next start only", restart],
    ["Backends", named.filter(([, names]) => names.length).map(([what, names]) => `${what}: ${names.join(", ")}`)],
    ["The latest requests", sampled(decisions)],
  ];
}

function sampled({ compared, differ, unknown, differences: lines }) {
  if (!compared && !unknown) return ["none to compare"];
  return [
    `${differ} of ${compared} would be decided differently`,
    ...lines.map((each) => `${each.count} times ${each.what}: ${each.now} → ${each.then}`),
    ...(unknown ? [`${unknown} cannot be compared: their rules test what is not kept, such as headers`] : []),
  ];
}

async function attempt(act) {
  find("#file-trouble").textContent = find("#file-done").textContent = "";
  try {
    await act();
  } catch (error) {
    find("#file-trouble").textContent = `✕ ${error.message}`;
  }
}

find("#draft").addEventListener("submit", compare);
find("#close-draft").addEventListener("click", () => {
  find("#draft").hidden = true;
  find("#compared").replaceChildren();
});
