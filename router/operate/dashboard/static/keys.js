// The panel of tenants' keys: list, issue, rotate, revoke. A new key is on the page until it is put away.

import { choices, h, row, sync, visible } from "./draw.js";

const find = (selector) => document.querySelector(selector);
const day = (unix) => (unix === null ? h("span", { class: "dim" }, "never") : new Date(unix * 1000).toISOString().slice(0, 10));
const role = () => document.body.dataset.role;

let ask = null;
let tenant = "";

/** Offer what the role may do. `asks` is the page's way to the router. */
export function keys(now, asks) {
  ask = asks;
  find("#keyed").hidden = role() === "viewer";
  choices(find("#keys-tenant"), now.tenants.map((item) => item.name), "choose a tenant");
  if (find("#keys-tenant").value !== tenant) choose();
  offer();
}

function offer() {
  // an operator is offered nothing that would be refused
  for (const control of find("#issue").querySelectorAll("input, button")) control.disabled = role() !== "owner" || !tenant;
}

async function choose() {
  tenant = find("#keys-tenant").value;
  putAway();
  offer();
  sync(find("#keys tbody"), [], String, row);
  await list();
}

const path = (...parts) => ["/admin/tenants", tenant, "keys", ...parts].map((part, at) => (at ? encodeURIComponent(part) : part)).join("/");

async function list() {
  const asked = tenant;
  const found = asked ? (await attempt(() => ask(path())))?.keys : [];
  // another tenant may have been chosen meanwhile
  if (!found || asked !== tenant) return;
  find("#no-keys").hidden = found.length > 0;
  find("#no-keys").textContent = asked ? `${asked} has no keys.` : "Choose a tenant to see its keys.";
  find("#keys").hidden = !found.length;
  sync(find("#keys tbody"), found, (key) => key.id, () => row(cells, ["", "", "", "", "", "", ""]));
}

function cells(key) {
  const isIssued = key.from === "api";
  return [
    [h("strong", {}, key.id), h("small", {}, key.name ?? "")], key.team ?? h("span", { class: "dim" }, "–"),
    isIssued ? day(key.created) : h("span", { class: "dim" }, "in the SLA file"),
    isIssued ? (key.expired ? h("span", { class: "bad" }, "✕ expired") : [day(key.expires), h("small", {}, key.replaced_by ? `replaced by ${key.replaced_by}` : "")]) : "–",
    isIssued ? day(key.last_used) : "–",
    limits(key.limits), isIssued ? actions(key) : "",
  ];
}

const limits = (set) => {
  const shown = Object.entries(set).map(([name, value]) =>
    `${name.replaceAll("_", " ")} ${name === "budgets" ? Object.entries(value).map(([of, { cost }]) => `${of} ${cost}`).join(", ") : value}`);
  return shown.length ? shown.map((line) => h("small", {}, line)) : h("span", { class: "dim" }, "none of its own");
};

function actions(key) {
  const button = (word, act) => h("button", { "aria-label": `${word} ${key.id}`, disabled: role() !== "owner", onclick: act }, word);
  return h("span", { class: "limits" }, button("rotate", () => make(path(key.id, "rotate"), {})), button("revoke", () => revoke(key)));
}

async function issue(event) {
  event.preventDefault();
  const form = Object.fromEntries([...new FormData(find("#issue"))].filter(([, value]) => value));
  if (await make(path(), form)) find("#issue").reset();
}

async function make(where, body) {
  const made = await attempt(() => ask(where, { method: "POST", body }));
  if (!made) return false;
  if (made.tenant === tenant) {
    find("#new-key").hidden = false;
    find("#new-key-text").value = made.key;
    find("#new-key-text").focus();
    find("#new-key-text").select();
  }
  await list();
  return true;
}

function revoke(key) {
  find("#revoke-what").textContent = `Key ${key.id}${key.name ? ` (${visible(key.name)})` : ""} of ${tenant} will be refused at once. This cannot be undone.`;
  const where = path(key.id);
  find("#revoke-form").onsubmit = async (event) => {
    if (event.submitter?.value !== "revoke") return;
    if (await attempt(() => ask(where, { method: "DELETE" }))) await list();
    find("#keys-tenant").focus();
  };
  find("#revoke").showModal();
}

async function copy() {
  find("#new-key-text").select();
  try {
    await navigator.clipboard.writeText(find("#new-key-text").value);
    find("#copied").textContent = "✓ copied";
  } catch {
    // a page without TLS may not write there
    find("#copied").textContent = "selected: copy it with Ctrl+C";
  }
}

function putAway() {
  find("#new-key").hidden = true;
  find("#new-key-text").value = find("#copied").textContent = "";
}

async function attempt(act) {
  find("#keys-trouble").textContent = "";
  try {
    return await act();
  } catch (error) {
    find("#keys-trouble").textContent = `✕ ${error.message}`;
    return null;
  }
}

find("#keys-tenant").addEventListener("change", choose);
find("#issue").addEventListener("submit", issue);
find("#copy-key").addEventListener("click", copy);
find("#put-away").addEventListener("click", () => {
  putAway();
  find("#keys-tenant").focus();
});
