// The panel of budgets: what is used of each, and when it begins anew.

import { bar, h, lasting, row, sync } from "./draw.js";

const EVERY_MS = 5000;
const NEAR = 0.8;
const DAYS = 48 * 3600;
const find = (selector) => document.querySelector(selector);

/** Ask for the budgets every few seconds while the page is seen; those of keys only if the role may read them. */
export async function keepBudgets(ask) {
  const { role } = document.body.dataset;
  try {
    if (!document.hidden && role) budgets(await ask(`/admin/budgets${role === "viewer" ? "" : "?by=key"}`));
  } catch {
    // the snapshot tells of a router that does not answer
  }
  setTimeout(keepBudgets, role ? EVERY_MS : 100, ask);
}

function budgets(found) {
  find("#budgeted").hidden = !found.budgets.length;
  const more = found.all - found.budgets.length;
  find("#budgets-note").textContent = `the most used first; a soft budget refuses nothing${more > 0 ? ` · ${more} more are not shown` : ""}` +
    `${found.is_whole ? "" : " · there are too many keys with budgets to show all"}`;
  sync(find("#budgets tbody"), found.budgets, (budget) => budget.id, () => row(cells, ["", "", "n", "n", "", ""]));
}

function cells(budget) {
  const within = [budget.kind !== "tenant" && budget.tenant && `tenant ${budget.tenant}`,
    budget.kind !== "team" && budget.team && `team ${budget.team}`].filter(Boolean).join(", ");
  return [
    [h("strong", {}, budget.name), h("small", {}, within ? `${budget.kind} of ${within}` : budget.kind)],
    budget.share === null ? h("span", { class: "dim" }, "the store of quotas is away") : used(budget.share),
    budget.used ?? h("span", { class: "dim" }, "not known"),
    [budget.limit, budget.is_soft ? h("small", {}, "soft") : ""],
    budget.is_renewed ? `a ${budget.period}`.replace("a hour", "an hour") : budget.period,
    ending(budget),
  ];
}

function used(part) {
  const word = part >= 1 ? "✕ reached, " : part >= NEAR ? "◐ near, " : "";
  return h("span", { class: "meter" }, bar(part, { width: 90, bad: part >= 1 }),
    h("span", { class: part >= 1 ? "bad" : null }, `${word}${Math.floor(part * 100)} %`));
}

function ending({ is_renewed: isRenewed, left_s: left }) {
  if (left === null) return h("span", { class: "dim" }, "never ends");
  const time = left > DAYS ? `${Math.round(left / 86400)} days` : lasting(left);
  return isRenewed ? `in ${time}` : `ends in ${time}`;
}
