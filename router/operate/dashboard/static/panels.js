// What each panel shows of a snapshot.

import { bar, bullet, choices, clock, count, h, money, row, seconds, share, strip, sync, trend } from "./draw.js";

const MOST_LISTED = 100;
const TREND = 90;
const SIGNS = { well: "✓", draining: "◐", ill: "✕", unreached: "○", finished: "✓", running: "◐", retried: "✕",
  cancelled: "○", rejected: "✕", evicted: "✕", failed: "✕", ready: "✓", "in force": "✓", "rolled back": "✕", warming: "◐", partial: "◐", lost: "✕" };
const TROUBLE = new Set(["ill", "failed", "rejected", "evicted", "retried", "partial", "lost", "rolled back"]);
const GOOD = new Set(["well", "finished", "ready", "in force"]);
/** Filters that drop a backend only while it is full, as in policies/compose.py. */
const PLACE = new Set(["under_limit", "has_room"]);

const body = (id) => document.querySelector(`#${id} tbody`);
const sum = (numbers) => Object.values(numbers).reduce((total, number) => total + number, 0);

export function sign(word, note = "") {
  const tone = TROUBLE.has(word) ? "bad" : GOOD.has(word) ? "good" : "dim";
  return h("span", { class: tone }, `${SIGNS[word] ?? "○"} ${word}${note}`);
}

/** What stands in place of a hit rate that is not known. */
const hits = (row) => (row.hit_share === null ? h("span", { class: "dim" }, row.prompt_tokens ? "not reported" : "–") : null);

const trends = new Map();

export function tiles(now) {
  const ended = sum(Object.fromEntries(now.tenants.map((tenant) => [tenant.name, sum(tenant.outcomes)])));
  const prompts = sum(now.tenants.map((tenant) => tenant.reported_tokens));
  const isSilent = !prompts && now.tenants.some((tenant) => tenant.prompt_tokens);
  const cached = sum(now.tenants.map((tenant) => tenant.cached_tokens));
  const first = sum(now.classes.map((row) => (row.ttft.target_s === null ? 0 : row.ttft.count)));
  const late = sum(now.classes.map((row) => row.ttft.late));
  const isMissed = now.classes.some(({ ttft }) => ttft.target_s !== null && ttft.at_quantile_s > ttft.target_s);
  const well = now.backends.filter((backend) => backend.state === "well").length;
  const rate = ended / Math.max(1, now.window_s);
  const shown = [
    ["requests a second", rate, count(rate), "ended"],
    ["at backends", now.in_flight, count(now.in_flight), "in flight"],
    ["waiting here", now.waiting, count(now.waiting), "in the queue"],
    ["first tokens late", first ? late / first : 0, first ? share(late / first) : "–", first ? `${late} of ${first}` : "none seen", isMissed],
    ["prompts cached", prompts ? cached / prompts : 0, prompts ? share(cached / prompts) : "–", isSilent ? "not reported" : `of ${count(prompts)} tokens`],
    ["backends well", well, `${well} of ${now.backends.length}`, "", now.backends.some((backend) => TROUBLE.has(backend.state))],
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
      h("h2", {}, name), h("strong", { class: bad ? "bad" : null }, bad ? `✕ ${text}` : text), h("small", {}, note), trend(past, TREND));
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
  const cells = (service) => [
    [h("strong", {}, service.name), h("small", {}, `rank ${service.rank}${service.deadline_s ? `, done within ${seconds(service.deadline_s)}` : ""}`)],
    measured(service.ttft), measured(service.tpot), count(service.waiting), ended(service.outcomes),
    Object.entries(service.steps).map(([step, number]) => `${step} ${number}`).join(" · ") || h("span", { class: "dim" }, "–"),
  ];
  sync(body("classes"), now.classes, (service) => service.name, () => row(cells, ["", "", "", "n"]));
}

function limits(budgets) {
  const shown = Object.entries(budgets).map(([name, { limit, remaining, left: amount }]) => {
    const left = limit ? remaining / limit : 0;
    const low = left < 0.1;
    return h("span", { title: `${amount} left, ${share(left)} of the limit` }, bar(left, { width: 60, bad: low }), h("small", { class: low ? "bad" : null }, `${low ? "✕ " : ""}${name === "cost" ? amount : `${count(remaining)} ${name}`}`));
  });
  return shown.length ? h("div", { class: "limits" }, shown) : h("span", { class: "dim" }, "no limits");
}

export function tenants(now) {
  const cells = (tenant) => [
    [h("strong", {}, tenant.name), h("small", {}, `weight ${tenant.weight}`)],
    h("span", { class: "meter" }, bar(tenant.share, { tick: tenant.entitled, width: 80 }), share(tenant.share)),
    count(tenant.running), count(tenant.waiting),
    hits(tenant) ?? share(tenant.hit_share),
    money(tenant.cost_minute, tenant.currency), money(tenant.cost, tenant.currency), limits(tenant.budgets),
  ];
  sync(body("tenants"), now.tenants, (tenant) => tenant.name, () => row(cells, ["", "", "n", "n", "n", "n", "n"]));
}

export function backends(now, change) {
  const make = () => {
    const weight = h("input", { class: "weight", type: "number", min: "0.1", max: "1000", step: "any",
      onchange: (event) => event.target.checkValidity() && change(element.name, { weight: Number(event.target.value) }) });
    const button = h("button", { onclick: () => change(element.name, { draining: element.isUsed }) });
    const element = row((backend) => {
      element.name = backend.name;
      element.isUsed = !backend.draining;
      button.textContent = element.isUsed ? "drain" : "undrain";
      button.setAttribute("aria-label", `${button.textContent} ${backend.server}`);
      weight.setAttribute("aria-label", `weight of ${backend.server}`);
      // the ranks of a server are drained and weighed together
      button.hidden = weight.hidden = backend.rank > 0;
      // a viewer is offered nothing that would be refused
      button.disabled = weight.disabled = document.body.dataset.role === "viewer";
      if (document.activeElement !== weight) weight.value = backend.weight;
      const used = backend.total_tokens ? 1 - backend.free_tokens / backend.total_tokens : null;
      const isNew = element.children.length === 0;
      return [
        [h("strong", {}, backend.name), h("small", {}, backend.rank ? `rank ${backend.rank} of ${backend.server}`
          : `${backend.pool === backend.kind ? backend.kind : `${backend.pool}, ${backend.kind}`}${backend.ranks > 1 ? `, rank 0 of ${backend.ranks}` : ""}`)],
        [sign(backend.state), h("small", {}, backend.draining && backend.state !== "draining" ? "and draining" : ""),
          backend.trouble ? h("small", { class: "reason" }, `for ${seconds(backend.trouble_s)}: ${backend.trouble}`) : ""],
        [h("span", { class: "meter" }, bar(backend.most ? backend.running / backend.most : 0, { width: 70, bad: backend.waiting > 0 }),
          `${count(backend.running)}${backend.most ? ` of ${count(backend.most)}` : ""}`), h("small", {}, backend.waiting ? `${count(backend.waiting)} wait there` : `${count(backend.in_flight)} of this router`)],
        used === null
          ? h("span", { class: "dim" }, backend.free_tokens === null ? "not reported" : `${count(backend.free_tokens)} tokens free`)
          : [h("span", { class: "meter" }, bar(used, { width: 60, bad: used > 0.95 }), share(used)), h("small", {}, `${count(backend.free_tokens)} of ${count(backend.total_tokens)} free`)],
        [hits(backend) ?? h("span", { class: "meter" }, bar(backend.hit_share, { width: 60 }), share(backend.hit_share)), h("small", {}, backend.events)],
        seconds(backend.queue_s),
        isNew ? weight : undefined,
        isNew ? button : undefined,
      ];
    }, ["", "", "", "", "", "n"]);
    return element;
  };
  sync(body("backends"), now.backends, (backend) => backend.name, make);
}

const lasting = (s) => (s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`);

function place(held, tokens) {
  const isShort = held.can_pin && held.pinned_tokens < tokens;
  const stays = !held.can_pin ? "cached, not pinned" : isShort ? `${count(held.pinned_tokens)} of ${count(tokens)} pinned` : "pinned";
  return h("span", { class: "place" }, h("strong", {}, held.backend),
    bar(held.can_pin ? held.pinned_tokens / tokens : 0, { width: 60, bad: isShort }), h("small", { class: isShort ? "bad" : null }, stays));
}

export function prefixes(now) {
  document.querySelector("#kept").hidden = !now.all_prefixes;
  const more = now.all_prefixes - now.prefixes.length;
  document.querySelector("#kept-note").textContent =
    `computed before they are asked for, and pinned where backends can; the bar is what stays of it${more ? ` · ${count(more)} more are not shown` : ""}`;
  const cells = (prefix) => [
    [h("strong", {}, prefix.id), h("small", {}, prefix.model)], prefix.tenant,
    [sign(prefix.state), h("small", { class: "reason" }, prefix.message)], count(prefix.tokens),
    [h("span", { class: "places" }, prefix.places.length ? prefix.places.map((each) => place(each, prefix.tokens)) : h("span", { class: "dim" }, "nowhere")),
      h("small", {}, prefix.places.length < prefix.shards ? `${prefix.places.length} of ${prefix.shards} backends` : "")],
    lasting(prefix.left_s),
  ];
  sync(body("prefixes"), now.prefixes, (prefix) => `${prefix.tenant}/${prefix.id}`, () => row(cells, ["", "", "", "n", "", "n"]));
}

export function splits(now) {
  document.querySelector("#shared").hidden = !now.splits.length;
  const cells = (split) => [
    `rule ${split.rule}`, h("strong", {}, split.pool), h("span", { class: "meter" }, bar(split.share, { width: 120 }), share(split.share)),
    count(split.requests), count(split.failed), count(split.missed),
    split.lost_because ? [sign("rolled back"), h("small", { class: "reason" }, split.lost_because)] : sign("in force"),
  ];
  sync(body("splits"), now.splits, (split) => `${split.rule}/${split.pool}`, () => row(cells, ["", "", "", "n", "n", "n", ""]));
}

export function mirrors(now) {
  document.querySelector("#mirrored").hidden = !now.mirrors.length;
  const beside = (theirs, ours, show) => (theirs === null ? h("span", { class: "dim" }, "–") : `${show(theirs)} (${show(ours)})`);
  const cells = (mirror) => [
    `rule ${mirror.rule}`, h("strong", {}, mirror.pool), share(mirror.share), count(mirror.pairs),
    `${count(mirror.failed)} (${count(mirror.own_failed)})`, count(mirror.left_out),
    beside(mirror.ttft_s, mirror.own_ttft_s, seconds), beside(mirror.seconds, mirror.own_seconds, seconds),
    beside(mirror.tokens, mirror.own_tokens, (number) => count(Math.round(number))),
  ];
  sync(body("mirrors"), now.mirrors, (mirror) => `${mirror.rule}/${mirror.pool}`, () => row(cells, ["", "", "n", "n", "n", "n", "n", "n", "n"]));
}

const searched = (row) => `${row.tenant} ${row.service_class} ${row.model} ${row.chosen} ${row.outcome} ${row.code} ${row.why} ${row.request}`.toLowerCase();

/** Shows the newest of `all` that hold every word of `filter`, and none that has a minus; `chosen` is the number of the selected one. */
export function stream(all, filter, chosen, choose) {
  const words = filter.toLowerCase().split(/\s+/).filter((word) => word.replace("-", ""));
  const has = (text, word) => (word.startsWith("-") ? !text.includes(word.slice(1)) : text.includes(word));
  const found = all.filter((decision) => words.every((word) => has(searched(decision), word))).slice(0, MOST_LISTED);
  const cells = (decision) => [
    h("time", { title: decision.request }, clock(decision.at)), [decision.tenant, h("small", {}, decision.service_class)],
    [decision.prompt_tokens ? (decision.likely_prompt_tokens ? "~" : "") + count(decision.prompt_tokens) : "–", h("small", {}, decision.cached_tokens ? `${share(decision.cached_tokens / decision.prompt_tokens)} cached` : "")],
    decision.chosen ?? h("span", { class: "dim" }, "none"),
    [seconds(decision.ttft_s), h("small", {}, decision.predicted_ttft_s === null ? "" : `${seconds(decision.predicted_ttft_s)} expected`)],
    [sign(decision.outcome), h("small", {}, decision.code !== decision.outcome ? decision.code : "")], decision.why,
  ];
  sync(body("stream"), found, (decision) => decision.number, (decision) => {
    const element = row(cells, ["", "", "n", "", "n", "", "why"]);
    element.addEventListener("click", () => choose(decision.number));
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
  const names = weights ?? [...new Set(candidates.flatMap((candidate) => Object.keys(candidate.scores)))];
  return h("table", {},
    h("thead", {}, h("tr", {}, ...["candidate", "total", ...names].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, candidates.map((candidate) => h("tr", {},
      h("td", {}, h("strong", {}, candidate.backend)), h("td", {}, candidate.total.toFixed(3)),
      ...names.map((name) => {
        const value = candidate.scores[name];
        return h("td", {}, value === null || value === undefined ? "–" : h("span", { class: "meter" }, bar(value, { width: 60 }), value.toFixed(2)));
      })))));
}

const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));

function prefix(found, all) {
  if (found.blocks === null) return [h("p", { class: "dim" }, "The prompt was not tokenized: the backends of its model take text.")];
  if (!found.blocks) return [h("p", { class: "dim" }, "The prompt is shorter than one block, so nothing of it can be shared.")];
  const serving = all.filter((backend) => !found.row.model || backend.models.includes(found.row.model) || backend.name in found.held);
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
function promptSize(row) {
  if (!row.likely_prompt_tokens) return `${count(row.prompt_tokens)} in the prompt`;
  const [low, high] = row.likely_prompt_tokens;
  return `about ${count(row.prompt_tokens)} in the prompt (estimated, ${count(low)} to ${count(high)})`;
}

export function detail(found, all) {
  const { row } = found;
  document.querySelector("#detail-body").replaceChildren(
    facts([
      ["request", row.request], ["asked", `${row.tenant} · ${row.service_class} · ${row.model || "–"} · ${clock(row.at)}`],
      ["went to", row.chosen ?? "none"], ["policy", found.policy],
      ["why", row.why],
      ["first token", row.ttft_s === null ? "" : `after ${seconds(row.ttft_s)}, ${seconds(row.predicted_ttft_s)} were expected of the backend`],
      ["tokens", `${promptSize(row)}, ${row.cached_tokens === null ? "how many were cached is not reported" : `${count(row.cached_tokens)} of them cached`}; ${count(row.completion_tokens)} in the answer`],
      ["outcome", sign(row.outcome, row.code && row.code !== row.outcome ? `: ${row.code}` : "")],
    ]),
    h("h3", {}, "Where its prefix lives now"), ...prefix(found, all),
    ...(found.candidates.length ? [h("h3", {}, "What was weighed"), table(found.candidates)] : []),
    ...(Object.keys(found.dropped).length
      ? [h("h3", {}, "Left out"), facts(leftOut(found))] : []));
}

/** Each backend that was left out, and why, in words. */
const leftOut = (found) => Object.entries(found.dropped).map(([name, objection]) => [name, found.objections[objection]]);

export function options(now) {
  const fill = (name, values, first) => choices(document.querySelector(`#explain select[name="${name}"]`), values, first);
  fill("tenant", now.tenants.map((item) => item.name));
  fill("model", now.models);
  fill("priority", now.classes.map((item) => item.name), "none");
}

function notChosen({ awaits, dropped }) {
  if (awaits) return `none yet: the request waits for ${awaits}`;
  const isFull = Object.values(dropped).some((reason) => PLACE.has(reason));
  return isFull ? "none yet: the request waits for room" : "none: the request is rejected";
}

export function explained(found) {
  const rules = found.skipped.map((rule) => `rule ${rule.rule} no: ${rule.why.join("; ")}`);
  const targets = Object.entries(found.targets).map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
  document.querySelector("#explained").replaceChildren(
    h("div", {}, facts([
      ["rules", h("span", {}, ...rules.flatMap((line) => [line, h("br")]), `rule ${found.rule} yes`)],
      ["class", `${found.service_class}, rank ${found.rank}${found.ruled_class === found.service_class ? "" : `, lowered from ${found.ruled_class} by the priority`}`],
      ["targets", targets], ["on miss", found.on_miss.join(", then ")],
      ["pools", found.pools ? found.pools.join(", ") : "any"], ["policy", found.policy],
      ["goes to", h("strong", {}, found.chosen ?? notChosen(found))],
      ["first token", found.predicted_ttft_s === null ? "" : `expected after ${seconds(found.predicted_ttft_s)}`],
      ["left out", leftOut(found).map(([name, words]) => `${name}: ${words}`).join("; ")],
    ])),
    h("div", {}, found.candidates.length ? table(found.candidates, Object.keys(found.weights)) : ""));
}

/** Where cached tokens were lost, from the ideal to the measured value, and what missed targets waited for. */
export function diagnosed(found) {
  const parts = found.hit_rate ? [lostTokens(found.hit_rate)] : [];
  for (const target of found.targets) parts.push(missedTarget(target));
  for (const note of found.notes) parts.push(h("p", { class: "sub" }, note));
  document.querySelector("#diagnosed").replaceChildren(...parts);
}

function lostTokens(rate) {
  const whole = Math.max(1, rate.prompt_tokens);
  const lost = rate.ideal_tokens - rate.measured_tokens;
  const rows = rate.losses.filter((loss) => loss.tokens > 0).map((loss) =>
    causeRow(loss, bar(loss.tokens / lost, { bad: true }), `-${loss.points.toFixed(1)} points`));
  const title = `Hit rate ${share(rate.measured_tokens / whole)}, with one infinite cache ${share(rate.ideal_tokens / whole)}, ` +
    `of ${count(rate.prompt_tokens)} prompt tokens in ${count(rate.requests)} requests`;
  return h("div", {}, h("h3", {}, title), causeTable(rows));
}

function missedTarget(target) {
  const rows = target.causes.filter((cause) => cause.seconds > 0).map((cause) =>
    causeRow(cause, bar(cause.seconds / target.seconds, { bad: true }), seconds(cause.seconds)));
  return h("div", {}, h("h3", {}, `${target.target}: ${count(target.missed)} of ${count(target.requests)} requests missed their target`),
    causeTable(rows));
}

function causeRow(cause, drawn, amount) {
  const [example] = cause.examples;
  return h("tr", {}, h("td", {}, cause.cause.replaceAll("_", " ")), h("td", {}, drawn), h("td", { class: "n" }, amount),
    h("td", {}, `${cause.meaning}. Change: ${cause.remedy}`),
    h("td", {}, example ? h("small", {}, `such as ${example.request}`) : "", example ? h("small", {}, ` at ${example.backend}`) : ""));
}

const causeTable = (rows) => (rows.length ? h("table", {}, h("tbody", {}, ...rows)) : "");
