// The panel of usage: this month's cost by tenant and by day.

import { bar, count, h } from "./draw.js";

const MOST_SHOWN = 50;
const find = (selector) => document.querySelector(selector);

function amount({ cost, currency }) {
  if (!currency) return `${count(cost)} units of cost`;
  return `${cost && cost < 0.01 ? "below 0.01" : cost.toFixed(2)} ${currency}`;
}

/** Ask for this month's usage and show it. */
export async function showUsage(ask) {
  try {
    const byTenant = await ask("/admin/usage?by=tenant,currency");
    // a router without a database of usage knows no days
    const isWhole = byTenant.seconds === undefined;
    const days = isWhole ? (await ask("/admin/usage?by=day,currency")).usage : [];
    const tenants = totals(byTenant.usage).sort((a, b) => b.cost - a.cost);
    find("#used-note").textContent = `${isWhole ? "this month, in UTC, of all routers" : "of this router since it started: the file has no section usage"}` +
      `${tenants.length > MOST_SHOWN ? ` · ${tenants.length - MOST_SHOWN} more tenants are not shown` : ""}`;
    find("#used").replaceChildren(table("tenant", tenants.slice(0, MOST_SHOWN)), isWhole ? table("day", days) : "");
  } catch (error) {
    find("#used").replaceChildren(h("p", { class: "error" }, `✕ ${error.message}`));
  }
}

/** One row for each tenant and currency. */
function totals(rows) {
  const found = new Map();
  for (const row of rows) {
    const name = JSON.stringify([row.tenant, row.currency]);
    const total = found.get(name) ?? found.set(name, { tenant: row.tenant, currency: row.currency, requests: 0, prompt_tokens: 0, completion_tokens: 0, cost: 0 }).get(name);
    for (const what of ["requests", "prompt_tokens", "completion_tokens", "cost"]) total[what] += row[what];
  }
  return [...found.values()];
}

function table(by, rows) {
  if (!rows.length) return h("p", { class: "empty" }, "Nothing was used.");
  const most = ({ currency }) => Math.max(...rows.filter((row) => row.currency === currency).map((row) => row.cost)) || 1;
  const names = [[by, 1], ["cost", 2], ["requests", 1, "n"], ["tokens", 1, "n"]];
  return h("table", { "aria-label": `Usage by ${by}` },
    h("thead", {}, h("tr", {}, names.map(([name, colspan, tone = null]) => h("th", { scope: "col", colspan, class: tone }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("td", {}, h("strong", {}, String(row[by]).slice(0, by === "day" ? 10 : undefined) || "(not identified)")), h("td", {}, bar(row.cost / most(row))), h("td", { class: "n" }, amount(row)),
      h("td", { class: "n" }, count(row.requests)), h("td", { class: "n" }, count(row.prompt_tokens + row.completion_tokens))))));
}
