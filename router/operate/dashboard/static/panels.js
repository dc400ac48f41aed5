// What each panel shows of a snapshot.

import { bar, bullet, clock, count, h, row, seconds, share, strip, sync, trend } from "./draw.js";

const MOST_LISTED = 100;
const TREND = 90;
const SIGNS = { well: "✓", draining: "◐", ill: "✕", unreached: "○", finished: "✓", running: "◐", retried: "✕",
  cancelled: "○", rejected: "✕", evicted: "✕", failed: "✕", ready: "✓", warming: "◐", partial: "◐", lost: "✕" };
const TROUBLE = new Set(["ill", "failed", "rejected", "evicted", "retried", "partial", "lost"]);
const GOOD = new Set(["well", "finished", "ready"]);

const body = (id) => document.querySelector(`#${id} tbody`);
const sum = (numbers) => Object.values(numbers).reduce((total, one) => total + one, 0);

export function sign(word, note = "") {
  const tone = TROUBLE.has(word) ? "bad" : GOOD.has(word) ? "good" : "dim";
  return h("span", { class: tone }, `${SIGNS[word] ?? "○"} ${word}${note}`);
}

/** What stands in place of a hit rate that is not known. */
const hits = (one) => (one.hit_share === null ? h("span", { class: "dim" }, one.prompt_tokens ? "not reported" : "–") : null);

const trends = new Map();

export function tiles(now) {
  const ended = sum(Object.fromEntries(now.tenants.map((tenant) => [tenant.name, sum(tenant.outcomes)])));
  const prompts = sum(now.tenants.map((tenant) => tenant.reported_tokens));
  const isSilent = !prompts && now.tenants.some((tenant) => tenant.prompt_tokens);
  const cached = sum(now.tenants.map((tenant) => tenant.cached_tokens));
  const first = sum(now.classes.map((one) => (one.ttft.target_s === null ? 0 : one.ttft.count)));
  const late = sum(now.classes.map((one) => one.ttft.late));
  const isMissed = now.classes.some(({ ttft }) => ttft.target_s !== null && ttft.at_quantile_s > ttft.target_s);
  const well = now.backends.filter((one) => one.state === "well").length;
  const rate = ended / Math.max(1, now.window_s);
  const shown = [
    ["requests a second", rate, count(rate), "ended"],
    ["at backends", now.in_flight, count(now.in_flight), "in flight"],
    ["waiting here", now.waiting, count(now.waiting), "in the queue"],
    ["first tokens late", first ? late / first : 0, first ? share(late / first) : "–", first ? `${late} of ${first}` : "none seen", isMissed],
    ["prompts cached", prompts ? cached / prompts : 0, prompts ? share(cached / prompts) : "–", isSilent ? "not reported" : `of ${count(prompts)} tokens`],
    ["backends well", well, `${well} of ${now.backends.length}`, "", now.backends.some((one) => TROUBLE.has(one.state))],
  ];
  const items = shown.map(([name, value, text, note, bad]) => {
    const past = trends.get(name) ?? trends.set(name, []).get(name);
    past.push(value);
    if (past.length > TREND) past.shift();
    return { name, text, note, bad, past: [...past] };
  });
  sync(document.querySelector("#tiles"), items, (item) => item.name, () => {
    const element = h("div", { class: "tile" });
    element.show = ({ name, text, note, bad, past }) => element.replaceChildren(
      h("h3", {}, name), h("strong", { class: bad ? "bad" : null }, bad ? `✕ ${text}` : text), h("small", {}, note), trend(past, TREND));
    return element;
  });
}

function measured(measure) {
  if (!measure.count) return h("span", { class: "dim" }, measure.target_s === null ? "○ nothing seen" : `○ nothing seen · target ${seconds(measure.target_s)}`);
  const isKept = measure.target_s === null ? null : measure.at_quantile_s <= measure.target_s;
  const within = measure.target_s === null ? "" : ` p${Math.round(measure.quantile * 100)} within ${seconds(measure.target_s)}`;
  const verdict = isKept === null
    ? h("span", { class: "dim" }, "no target")
    : h("span", {}, h("span", { class: `verdict ${isKept ? "good" : "bad"}` }, isKept ? "✓ kept" : "✕ missed"), within);
  const late = measure.late ? ` · ${measure.late} of ${measure.count} late` : "";
  return [h("span", { class: "meter" }, bullet(measure, isKept), verdict),
    h("small", {}, `p50 ${seconds(measure.p50_s)} · p95 ${seconds(measure.p95_s)} · p99 ${seconds(measure.p99_s)}${late}`)];
}

const ended = (outcomes) => Object.entries(outcomes).map(([word, number], at) => h("span", {}, at ? " · " : "", sign(word, ` ${number}`)));

export function classes(now) {
  const cells = (one) => [
    [h("strong", {}, one.name), h("small", {}, `rank ${one.rank}${one.deadline_s ? `, done within ${seconds(one.deadline_s)}` : ""}`)],
    measured(one.ttft), measured(one.tpot), count(one.waiting), ended(one.outcomes),
    Object.entries(one.steps).map(([step, number]) => `${step} ${number}`).join(" · ") || h("span", { class: "dim" }, "–"),
  ];
  sync(body("classes"), now.classes, (one) => one.name, () => row(cells, ["", "", "", "n"]));
}

function limits(budgets) {
  const shown = Object.entries(budgets).map(([name, { limit, remaining }]) => {
    const left = limit ? remaining / limit : 0;
    const low = left < 0.1;
    return h("span", { title: `${remaining} of ${limit} left` }, bar(left, { width: 60, bad: low }), h("small", { class: low ? "bad" : null }, `${low ? "✕ " : ""}${count(remaining)} ${name}`));
  });
  return shown.length ? h("div", { class: "limits" }, shown) : h("span", { class: "dim" }, "no limits");
}

export function tenants(now) {
  const cells = (one) => [
    [h("strong", {}, one.name), h("small", {}, `weight ${one.weight}`)],
    h("span", { class: "meter" }, bar(one.share, { tick: one.entitled, width: 80 }), share(one.share)),
    count(one.running), count(one.waiting),
    hits(one) ?? share(one.hit_share),
    count(one.cost_minute), count(one.cost), limits(one.budgets),
  ];
  sync(body("tenants"), now.tenants, (one) => one.name, () => row(cells, ["", "", "n", "n", "n", "n", "n"]));
}

export function backends(now, change) {
  const make = () => {
    const weight = h("input", { class: "weight", type: "number", min: "0.1", max: "1000", step: "any",
      onchange: (event) => event.target.checkValidity() && change(element.name, { weight: Number(event.target.value) }) });
    const button = h("button", { onclick: () => change(element.name, { draining: element.isUsed }) });
    const element = row((one) => {
      element.name = one.name;
      element.isUsed = !one.draining;
      button.textContent = element.isUsed ? "drain" : "undrain";
      button.setAttribute("aria-label", `${button.textContent} ${one.server}`);
      weight.setAttribute("aria-label", `weight of ${one.server}`);
      // the ranks of a server are drained and weighed together
      button.hidden = weight.hidden = one.rank > 0;
      if (document.activeElement !== weight) weight.value = one.weight;
      const used = one.total_tokens ? 1 - one.free_tokens / one.total_tokens : null;
      const isNew = element.children.length === 0;
      return [
        [h("strong", {}, one.name), h("small", {}, one.rank ? `rank ${one.rank} of ${one.server}`
          : `${one.pool === one.kind ? one.kind : `${one.pool}, ${one.kind}`}${one.ranks > 1 ? `, rank 0 of ${one.ranks}` : ""}`)],
        [sign(one.state), h("small", {}, one.draining && one.state !== "draining" ? "and draining" : ""),
          one.trouble ? h("small", { class: "told" }, `for ${seconds(one.trouble_s)}: ${one.trouble}`) : ""],
        [h("span", { class: "meter" }, bar(one.most ? one.running / one.most : 0, { width: 70, bad: one.waiting > 0 }),
          `${count(one.running)}${one.most ? ` of ${count(one.most)}` : ""}`), h("small", {}, one.waiting ? `${count(one.waiting)} wait there` : `${count(one.in_flight)} of this router`)],
        used === null
          ? h("span", { class: "dim" }, one.free_tokens === null ? "not told" : `${count(one.free_tokens)} tokens free`)
          : [h("span", { class: "meter" }, bar(used, { width: 60, bad: used > 0.95 }), share(used)), h("small", {}, `${count(one.free_tokens)} of ${count(one.total_tokens)} free`)],
        [hits(one) ?? h("span", { class: "meter" }, bar(one.hit_share, { width: 60 }), share(one.hit_share)), h("small", {}, one.events)],
        seconds(one.queue_s),
        isNew ? weight : undefined,
        isNew ? button : undefined,
      ];
    }, ["", "", "", "", "", "n"]);
    return element;
  };
  sync(body("backends"), now.backends, (one) => one.name, make);
}

const lasting = (s) => (s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`);

function place(one, tokens) {
  const isShort = one.can_pin && one.pinned_tokens < tokens;
  const stays = !one.can_pin ? "cached, not pinned" : isShort ? `${count(one.pinned_tokens)} of ${count(tokens)} pinned` : "pinned";
  return h("span", { class: "place" }, h("strong", {}, one.backend),
    bar(one.can_pin ? one.pinned_tokens / tokens : 0, { width: 60, bad: isShort }), h("small", { class: isShort ? "bad" : null }, stays));
}

export function prefixes(now) {
  document.querySelector("#kept").hidden = !now.all_prefixes;
  const more = now.all_prefixes - now.prefixes.length;
  document.querySelector("#kept-note").textContent =
    `computed before anybody asks, and pinned where backends can; the bar is what stays of it${more ? ` · ${count(more)} more are not shown` : ""}`;
  const cells = (one) => [
    [h("strong", {}, one.id), h("small", {}, one.model)], one.tenant,
    [sign(one.state), h("small", { class: "told" }, one.message)], count(one.tokens),
    [h("span", { class: "places" }, one.places.length ? one.places.map((each) => place(each, one.tokens)) : h("span", { class: "dim" }, "nowhere")),
      h("small", {}, one.places.length < one.shards ? `${one.places.length} of ${one.shards} backends` : "")],
    lasting(one.left_s),
  ];
  sync(body("prefixes"), now.prefixes, (one) => `${one.tenant}/${one.id}`, () => row(cells, ["", "", "", "n", "", "n"]));
}

const searched = (one) => `${one.tenant} ${one.service_class} ${one.model} ${one.chosen} ${one.outcome} ${one.code} ${one.why} ${one.request}`.toLowerCase();

/** Shows the newest of `all` that hold every word of `filter`, and none that has a minus; `chosen` is the number of the selected one. */
export function stream(all, filter, chosen, choose) {
  const words = filter.toLowerCase().split(/\s+/).filter((word) => word.replace("-", ""));
  const has = (text, word) => (word.startsWith("-") ? !text.includes(word.slice(1)) : text.includes(word));
  const found = all.filter((one) => words.every((word) => has(searched(one), word))).slice(0, MOST_LISTED);
  const cells = (one) => [
    h("time", { title: one.request }, clock(one.at)), [one.tenant, h("small", {}, one.service_class)],
    [one.prompt_tokens ? (one.likely_prompt_tokens ? "~" : "") + count(one.prompt_tokens) : "–", h("small", {}, one.cached_tokens ? `${share(one.cached_tokens / one.prompt_tokens)} cached` : "")],
    one.chosen ?? h("span", { class: "dim" }, "nobody"),
    [seconds(one.ttft_s), h("small", {}, one.predicted_ttft_s === null ? "" : `${seconds(one.predicted_ttft_s)} expected`)],
    [sign(one.outcome), h("small", {}, one.code !== one.outcome ? one.code : "")], one.why,
  ];
  sync(body("stream"), found, (one) => one.number, (one) => {
    const element = row(cells, ["", "", "n", "", "n", "", "why"]);
    element.addEventListener("click", () => choose(one.number));
    return element;
  });
  const rows = [...body("stream").children];
  const isThere = rows.some((element) => element.dataset.key === String(chosen));
  rows.forEach((element, at) => {
    const isChosen = element.dataset.key === String(chosen);
    element.setAttribute("aria-selected", isChosen);
    element.tabIndex = isChosen || (!isThere && at === 0) ? 0 : -1;
  });
  const nothing = document.querySelector("#no-decisions");
  nothing.hidden = found.length > 0;
  nothing.textContent = all.length ? "No decision has all of these words." : "Nothing was asked yet.";
}

function table(candidates, weights) {
  const names = weights ?? [...new Set(candidates.flatMap((one) => Object.keys(one.scores)))];
  return h("table", {},
    h("thead", {}, h("tr", {}, ...["candidate", "total", ...names].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, candidates.map((one) => h("tr", {},
      h("td", {}, h("strong", {}, one.backend)), h("td", {}, one.total.toFixed(3)),
      ...names.map((name) => {
        const value = one.scores[name];
        return h("td", {}, value === null || value === undefined ? "–" : h("span", { class: "meter" }, bar(value, { width: 60 }), value.toFixed(2)));
      })))));
}

const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));

function prefix(found, all) {
  if (found.blocks === null) return [h("p", { class: "dim" }, "The prompt was not tokenized: the backends of its model take text.")];
  if (!found.blocks) return [h("p", { class: "dim" }, "The prompt is shorter than one block, so nothing of it can be shared.")];
  const serving = all.filter((one) => !found.row.model || one.models.includes(found.row.model) || one.name in found.held);
  serving.sort((a, b) => (found.held[b.name] ?? 0) - (found.held[a.name] ?? 0));
  const lines = serving.slice(0, 12).flatMap(({ name, state }) => {
    const held = found.held[name] ?? 0;
    const tokens = `${count(held * found.block_tokens)} of ${count(found.blocks * found.block_tokens)} tokens`;
    return [h("span", {}, h("strong", {}, name), name === found.row.chosen ? h("small", { class: "dim" }, " chosen") : "", state === "well" ? "" : h("small", {}, " ", sign(state))),
      strip(held, found.blocks), h("span", { class: held ? null : "dim" }, held ? tokens : "nothing of it")];
  });
  return [h("div", { class: "strip" }, lines)];
}

/** The prompt's length, in words; an estimate is named one. */
function promptSize(one) {
  if (!one.likely_prompt_tokens) return `${count(one.prompt_tokens)} in the prompt`;
  const [low, high] = one.likely_prompt_tokens;
  return `about ${count(one.prompt_tokens)} in the prompt (estimated, ${count(low)} to ${count(high)})`;
}

export function detail(found, all) {
  const { row: one } = found;
  document.querySelector("#detail-body").replaceChildren(
    facts([
      ["request", one.request], ["asked", `${one.tenant} · ${one.service_class} · ${one.model || "–"} · ${clock(one.at)}`],
      ["went to", one.chosen ?? "nobody"], ["policy", found.policy],
      ["why", one.why],
      ["first token", one.ttft_s === null ? "" : `after ${seconds(one.ttft_s)}, ${seconds(one.predicted_ttft_s)} were expected of the backend`],
      ["tokens", `${promptSize(one)}, ${one.cached_tokens === null ? "how many were cached is not reported" : `${count(one.cached_tokens)} of them cached`}; ${count(one.completion_tokens)} in the answer`],
      ["outcome", sign(one.outcome, one.code && one.code !== one.outcome ? `: ${one.code}` : "")],
    ]),
    h("h3", {}, "Where its prefix lives now"), ...prefix(found, all),
    ...(found.candidates.length ? [h("h3", {}, "What was weighed"), table(found.candidates)] : []),
    ...(Object.keys(found.dropped).length
      ? [h("h3", {}, "Dropped by a filter"), facts(Object.entries(found.dropped))] : []));
}

export function options(now) {
  const fill = (name, values, first) => {
    const select = document.querySelector(`#explain select[name="${name}"]`);
    const state = JSON.stringify(values);
    if (select.state === state) return;
    select.state = state;
    const before = select.value;
    select.replaceChildren(...(first ? [h("option", { value: "" }, first)] : []), ...values.map((value) => h("option", {}, value)));
    if (values.includes(before)) select.value = before;
  };
  fill("tenant", now.tenants.map((one) => one.name));
  fill("model", now.models);
  fill("priority", now.classes.map((one) => one.name), "none");
}

export function explained(told) {
  const rules = told.skipped.map((one) => `rule ${one.rule} no: ${one.why.join("; ")}`);
  const targets = Object.entries(told.targets).map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
  document.querySelector("#explained").replaceChildren(
    h("div", {}, facts([
      ["rules", h("span", {}, ...rules.flatMap((line) => [line, h("br")]), `rule ${told.rule} yes`)],
      ["class", `${told.service_class}, rank ${told.rank}${told.ruled_class === told.service_class ? "" : `, lowered from ${told.ruled_class} by the priority`}`],
      ["targets", targets], ["on miss", told.on_miss.join(", then ")],
      ["pools", told.pools ? told.pools.join(", ") : "any"], ["policy", told.policy],
      ["goes to", h("strong", {}, told.chosen ?? "nobody: it is refused")],
      ["first token", told.predicted_ttft_s === null ? "" : `expected after ${seconds(told.predicted_ttft_s)}`],
      ["dropped", Object.entries(told.dropped).map(([name, reason]) => `${name}: ${reason}`).join(", ")],
    ])),
    h("div", {}, told.candidates.length ? table(told.candidates, Object.keys(told.weights)) : ""));
}
