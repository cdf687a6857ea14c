// Asks the server for its overview and its tree, and shows them. The key lives in this tab only.

import { duration, element, icicle, meter, number, percent, sparkline, stackedBar, swatch, table } from "./draw.js";

const STORED = "sglang-ext-key";
const OVERVIEW_MS = 2000;
const TREE_EVERY = 2;
const MOST_RUNS = 2000;
const TREE_SIZE = [1200, 360];
const COLOURS = 10;
const SLO_SECONDS = 0.5;
const LOSSES = ["corrupt", "truncated", "not_a_page", "io_error"];
const TIERS = ["hbm", "cpu", "nvme"];

const at = (id) => document.getElementById(id);
const state = { timer: null, round: 0, paused: false, byTier: false, runs: [], drawn: "", chosen: -1, colours: new Map() };

class Refused extends Error {}

async function ask(path) {
  // Relative, so that the page also works behind a path of a proxy.
  const headers = { authorization: `Bearer ${sessionStorage.getItem(STORED)}` };
  // Behind a gateway, /ext/ui?engine=NAME shows another engine than the first.
  const engine = new URLSearchParams(location.search).get("engine");
  if (engine) headers["x-engine"] = engine;
  const answer = await fetch(new URL(`v1/${path}`, document.baseURI), { headers, cache: "no-store" });
  if (answer.status === 401) throw new Refused("The server does not know this key.");
  if (answer.status === 403) throw new Refused("This key is a tenant's. The page needs the admin key.");
  if (answer.status === 429) throw new Refused("Too many wrong keys came from here. Wait a minute.");
  if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
  return answer.json();
}

async function update() {
  clearTimeout(state.timer);
  if (!sessionStorage.getItem(STORED) || state.asking) return;
  state.asking = true;
  try {
    const wantsTree = state.round % TREE_EVERY === 0;
    const [overview, tree] = await Promise.all([ask("overview"), wantsTree ? ask(`tree?limit=${MOST_RUNS}`) : null]);
    state.round += 1;
    show(overview);
    if (tree) takeTree(tree);
    say("live", `Live, as of ${new Date(overview.time * 1000).toLocaleTimeString()}`);
  } catch (error) {
    if (error instanceof Refused) return forget(error.message);
    say("lost", `No answer: ${error.message}`);
  } finally {
    state.asking = false;
  }
  if (!state.paused && !document.hidden) state.timer = setTimeout(update, OVERVIEW_MS);
}

function say(kind, text) {
  at("status").className = kind;
  at("status").textContent = text;
}

function enter() {
  const known = Boolean(sessionStorage.getItem(STORED));
  at("login").hidden = known;
  for (const id of ["main", "forget", "pause"]) at(id).hidden = !known;
  if (known) update();
  else at("key").focus();
}

function forget(why = "") {
  clearTimeout(state.timer);
  sessionStorage.removeItem(STORED);
  say("", "Needs the admin key");
  at("refusal").textContent = why;
  enter();
}

// ---- what is shown

function colourOf(owner) {
  if (owner === "public" || owner === "") return "public";
  if (owner === "other" || owner === "t:system") return "other";
  if (!state.colours.has(owner)) state.colours.set(owner, state.colours.size);
  const place = state.colours.get(owner);
  return place < COLOURS ? `c${place}` : "other";
}

const nameOf = (owner) => (owner === "" ? "public" : owner.replace(/^t:/, "").replace(/^g:/, "group "));
const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);

function show(overview) {
  for (const tenant of overview.policy) colourOf(tenant.owner);
  showService(overview);
  showTiers(overview.tiers);
  showTenants(overview);
  showSlow(overview);
  showPolicy(overview);
}

function showService({ service, tenants, store }) {
  const waiting = tenants.reduce((total, tenant) => total + tenant.queued, 0);
  const lost = LOSSES.reduce((total, event) => total + (store[event] ?? 0), 0);
  const tiles = [
    ["Requests", number(service.requests), ""],
    ["Hit rate", percent(service.hit_rate), ""],
    ["First token, p50", duration(service.ttft_p50), ""],
    ["First token, p99", duration(service.ttft_p99), service.ttft_p99 > SLO_SECONDS ? "over" : ""],
    ["Waiting now", number(waiting), ""],
    ["Pages lost on disk", number(lost), lost ? "over" : ""],
  ];
  at("service").replaceChildren(...tiles.map(([name, value, kind]) => element("div", {}, element("dt", {}, name), element("dd", { class: kind }, value))));
}

function showTiers(tiers) {
  const owners = new Set();
  const bars = tiers.map((tier) => {
    const parts = Object.entries(tier.held).filter(([, amount]) => amount > 0)
      .sort(([a], [b]) => a.localeCompare(b))
      .map(([owner, amount]) => ({ name: nameOf(owner), amount, colour: colourOf(owner), owner }));
    parts.forEach((part) => owners.add(part.owner));
    const held = sum(tier.held);
    const label = `${tier.name}: ${parts.map((part) => `${part.name} ${number(part.amount)}`).join(", ") || "empty"}`;
    const amount = `${number(held)} of ${number(tier.capacity)} · ${percent(held / tier.capacity)}`;
    return element("div", { class: "tier" }, element("b", {}, tier.name), stackedBar(parts, Math.max(tier.capacity, held), label), element("span", { class: "amount" }, amount));
  });
  at("tiers").replaceChildren(...bars);
  at("legend").replaceChildren(...[...owners].sort().map((owner) => element("li", {}, swatch(colourOf(owner)), nameOf(owner))));
}

function showTenants({ tenants, owners, policy }) {
  const held = new Map(owners.map((owner) => [owner.name, owner]));
  const ownerOf = new Map(policy.map((tenant) => [tenant.name, tenant.owner]));
  const columns = ["tenant", "requests", "waiting", "hit rate", "over time", "p50", "p99", "recomputed", "HBM of quota"];
  const seen = tenants.filter((tenant) => tenant.recent || tenant.queued || tenant.requests);
  const rows = seen.map((tenant) => {
    const recent = tenant.recent ?? { requests: 0, hit_rates: [] };
    const owner = ownerOf.get(tenant.name) ?? `t:${tenant.name}`;
    const p99 = element("span", recent.ttft_p99 > SLO_SECONDS ? { class: "over" } : {}, duration(recent.ttft_p99));
    const spark = recent.hit_rates.length ? sparkline(recent.hit_rates, `Hit rate of ${tenant.name}, now ${percent(recent.hit_rate)}`) : "–";
    return [
      [swatch(colourOf(owner)), tenant.name], number(recent.requests), number(tenant.queued), percent(recent.hit_rate),
      spark, duration(recent.ttft_p50), p99, number(tenant.recomputed), quotaUse(held.get(owner)),
    ];
  });
  table(at("tenants"), columns, rows, "No request yet.");
}

function quotaUse(owner) {
  const quota = owner?.quota.hbm;
  if (!quota) return owner ? number(owner.held.hbm ?? 0) : "–";
  const part = (owner.held.hbm ?? 0) / quota;
  return element("span", {}, percent(part), meter(part));
}

function showSlow({ slow }) {
  const columns = ["tenant", "ended", "first token", "total", "prompt", "from cache", "output"];
  const rows = slow.map((request) => {
    const cached = Object.entries(request.cached).filter(([, tokens]) => tokens).map(([tier, tokens]) => `${number(tokens)} ${tier}`);
    const ended = new Date(request.ended * 1000).toLocaleTimeString();
    return [request.tenant, ended, duration(request.ttft), duration(request.seconds), number(request.prompt), cached.join(", ") || "0", number(request.output)];
  });
  table(at("slow"), columns, rows, "No request yet.");
}

function showPolicy({ policy, policy_total: total }) {
  at("policy-more").textContent = total > policy.length ? `The first ${number(policy.length)} of ${number(total)} tenants.` : "";
  const sizes = (given) => TIERS.filter((tier) => given[tier]).map((tier) => `${tier} ${given[tier]}`).join(", ") || "–";
  const columns = ["tenant", "isolation", "class", "weight", "quota", "reserve", "lifetime", "waiting at most"];
  const rows = policy.map((tenant) => [
    [swatch(colourOf(tenant.owner)), tenant.name],
    tenant.isolation === "shared" ? nameOf(tenant.owner) : tenant.isolation,
    tenant.sla, String(tenant.weight), sizes(tenant.quota) + (tenant.hard ? ", hard" : ""), sizes(tenant.reserve),
    `${TIERS.map((tier) => duration(tenant.ttl[tier])).join(" → ")}, ${tenant.ttl_mode}`, number(tenant.max_queued),
  ]);
  table(at("policy"), columns, rows, "No tenants.");
}

// ---- the tree

function takeTree({ ranks }) {
  state.runs = ranks.flatMap((rank) => rank.runs);
  state.total = ranks.reduce((total, rank) => total + rank.runs_total, 0);
  drawTree();
}

function drawTree() {
  const now = JSON.stringify([state.byTier, state.runs.map((run) => [run.id, run.level, run.tokens, run.owner, run.tiers])]);
  if (now === state.drawn) return tellRun();
  state.drawn = now;
  const focused = at("tree").contains(document.activeElement);
  const colour = (run) => (state.byTier ? run.tiers[0] ?? "other" : colourOf(run.owner));
  const svg = icicle(state.runs, colour, TREE_SIZE);
  svg.addEventListener("keydown", walk);
  svg.addEventListener("pointerover", (event) => event.target.dataset.index && choose(Number(event.target.dataset.index)));
  at("tree").replaceChildren(svg);
  if (focused) svg.focus();
  const names = { hbm: "HBM", cpu: "CPU, not in HBM", nvme: "NVMe only" };
  at("tier-legend").hidden = !state.byTier;
  at("tier-legend").replaceChildren(...TIERS.map((tier) => element("li", {}, swatch(tier), names[tier])));
  choose(Math.min(state.chosen, state.runs.length - 1));
}

function walk(event) {
  const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  const step = steps[event.key];
  if (step === undefined || !state.runs.length) return;
  event.preventDefault();
  choose(Math.max(0, Math.min(state.runs.length - 1, state.chosen + step)));
}

function choose(index) {
  at("tree").querySelector(".chosen")?.classList.remove("chosen");
  state.chosen = index;
  const rect = index < 0 ? null : at("tree").querySelector(`[data-index="${index}"]`);
  rect?.classList.add("chosen");
  rect?.parentNode.append(rect);
  tellRun();
}

function tellRun() {
  const run = state.runs[state.chosen];
  const longest = Math.max(0, ...state.runs.map((each) => each.start + each.tokens));
  const more = state.total > state.runs.length ? ` The first ${number(state.runs.length)} of ${number(state.total)} are shown.` : "";
  at("run").textContent = run
    ? `${nameOf(run.owner)}: ${number(run.tokens)} tokens from token ${number(run.start)} on, in ${run.tiers.join(", ") || "no tier"}; ` +
      `used ${duration(run.age_ms / 1000)} ago, ${number(run.hits)} hits` +
      `${run.locks ? ", in use" : ""}${run.pins ? ", pinned" : ""}.`
    : `${number(state.total ?? 0)} runs of pages, the longest text ${number(longest)} tokens. Point at one, or walk with the arrow keys.${more}`;
}

function colourBy(tier) {
  state.byTier = tier;
  at("by-tier").setAttribute("aria-pressed", String(tier));
  at("by-owner").setAttribute("aria-pressed", String(!tier));
  drawTree();
}

// ---- what people do

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  at("key").value = "";
  if (!/^[!-~]+$/.test(key)) return forget("A key is made of letters, digits and signs, without spaces.");
  sessionStorage.setItem(STORED, key);
  at("refusal").textContent = "";
  enter();
});
at("forget").addEventListener("click", () => forget());
at("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  at("pause").setAttribute("aria-pressed", String(state.paused));
  clearTimeout(state.timer);
  if (state.paused) say("", "Paused");
  else update();
});
at("by-owner").addEventListener("click", () => colourBy(false));
at("by-tier").addEventListener("click", () => colourBy(true));
document.addEventListener("visibilitychange", () => document.hidden || update());
enter();
