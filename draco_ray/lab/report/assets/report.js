"use strict";
// A group is unpacked when it is opened. Text of a run reaches the page as text nodes only: nothing here sets innerHTML.

const MARK = { "1": "✓", "-1": "✗", "0": "–" };
const WORD = { "1": "pass", "-1": "fail", "0": "not applicable" };
const KIND = { "1": "pass", "-1": "fail", "0": "na" };
const PAGE = 100;
const unpacked = new Map();
let index = null;
let ticket = 0;

async function inflate(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function open(place) {
  if (!unpacked.has(place)) {
    if (unpacked.size >= 20) unpacked.delete(unpacked.keys().next().value);
    unpacked.set(place, await inflate("g" + place));
  }
  return unpacked.get(place);
}

// ---- elements

// Characters that change the writing direction, also of the text that follows, are shown as code points.
const DIRECTION = /[\u202a-\u202e\u2066-\u2069]/g;
const visible = (text) => text.replace(DIRECTION, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase()}⟩`);
const SHOWN = ["title", "aria-label"];

function el(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : SHOWN.includes(key) ? visible(value) : value);
  }
  const there = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...there.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

const signed = (value, digits = 2) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value).toFixed(digits);
  return (Number(size) === 0 ? "" : value < 0 ? "−" : "+") + size;
};
const fixed = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value) => (value === null || value === undefined ? "–" : Math.round(value * 100) + "%");
const words = (name) => (name || "").replaceAll("_", " ");
const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
// An advantage that is shown as 0.00 counts as zero: rounding may leave 1e-17.
const sign = (value) => (value === null || value === undefined || Math.abs(value) < 0.005 ? "zero" : value > 0 ? "plus" : "minus");
// Outcome of an evaluated rollout: whether its task is solved or, without an evaluator, the share of the judge's verdicts that pass.
const outcomeKind = (success) => (success === null || success === undefined ? "zero" : Number(success) >= 0.5 ? "plus" : "minus");
const outcomeWord = (success, yes, no) => (success === null || success === undefined ? "–" : typeof success === "number" ? percent(success) : success ? yes : no);
// A measurement is identified by its name, a training step by its number.
const keyOf = (group) => (group.key === undefined ? String(group.step) : group.key);
const whereOf = (group) => (group.key === undefined ? `step ${group.step}` : group.key);
const address = (group) => `${encodeURIComponent(keyOf(group))}/${encodeURIComponent(group.task)}`;
const groupLink = (group) => `#group/${address(group)}`;
const rolloutLink = (group, rollout, rest) => `#rollout/${address(group)}/${rollout}${rest ? "/" + rest : ""}`;
const taskLink = (task) => `#task/${encodeURIComponent(task)}`;
const besideLink = (group, rollout, other, its) => `#beside/${address(group)}/${rollout}/${address(other)}/${its}`;
const findGroup = (key, task) => index.groups.findIndex((group) => keyOf(group) === key && group.task === task);

function folded(summary, text, options = {}) {
  return el("details.fold" + (options.kind ? "." + options.kind : ""), { open: options.open, id: options.id }, el("summary", {}, summary), copied(block(text), text),
    options.link ? el("a.linkto", { href: options.link }, "Link to this message") : null);
}

// Long texts scroll, so they must be reachable by keyboard.
const block = (...children) => el("pre", { tabindex: "0" }, ...children);

function copied(node, text) {
  const button = el("button.copy", { type: "button", title: "Copy this text", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      button.textContent = "not allowed";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  } }, "copy");
  return el("div.copied", {}, node, button);
}

// ---- colour for code: strings, comments, numbers, words of the language, what is called

const CODE = /(?<comment>#[^\n]*)|(?<string>(?:\b[rRbBfFuU]{1,2})?(?:"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))|(?<number>\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b)|(?<word>\b(?:and|as|assert|async|await|break|case|class|continue|def|del|elif|else|except|False|finally|for|from|global|if|import|in|is|lambda|match|None|nonlocal|not|or|pass|raise|return|True|try|while|with|yield|true|false|null|function|const|let|var)\b)|(?<called>\b[A-Za-z_]\w*(?=\())/g;

function colored(code) {
  const parts = [];
  let done = 0;
  for (const found of code.matchAll(CODE)) {
    const kind = Object.keys(found.groups).find((name) => found.groups[name] !== undefined);
    parts.push(code.slice(done, found.index), el("span." + kind, {}, found[0]));
    done = found.index + found[0].length;
  }
  return [...parts, code.slice(done)];
}

// Link the steps that a text names; `here` makes the address of a part of the rollout.
function withSteps(text, rollout, here) {
  const parts = [];
  let done = 0;
  for (const found of (text || "").matchAll(/\bsteps?\s+#?\d+(?:\s*(?:,|and|or|to|through|[-–&\/])\s*(?:and\s+)?(?:steps?\s+)?\d+)*/gi))
    for (const number of found[0].matchAll(/\d+/g)) {
      const place = rollout.turns.findIndex((turn) => turn.step === Number(number[0]));
      if (place < 0) continue;
      const start = found.index + number.index;
      parts.push(text.slice(done, start), el("a.tostep", { href: here("t" + (place + 1)) }, number[0]));
      done = start + number[0].length;
    }
  return [...parts, (text || "").slice(done)];
}

// The messages before the first turn; each carries a link of its own.
function promptFolds(data, text, here) {
  return el("div.prompt", {}, data.prompt.map((message, order) => folded(message.role, text(message.text), { open: message.role === "user", id: "p" + (order + 1), link: here("p" + (order + 1)) })));
}

// ---- judge calls

function callList(calls, text, base) {
  if (!calls.length) return null;
  return el("section.card.calls", {}, el("h2", {}, "Judge calls"), calls.map((call, place) => callCard(call, text, `${base}/call${place + 1}`, place + 1)));
}

function callCard(call, text, link, number) {
  const tokens = `${call.input_tokens.toLocaleString("en")} tokens in${call.cached_tokens ? ` (${call.cached_tokens.toLocaleString("en")} cached)` : ""}, ${call.output_tokens.toLocaleString("en")} out`;
  const paid = call.requests === 0 ? "replayed from the cache" : `${call.dollars ? "$" + call.dollars.toFixed(4) : "no price"} · ${plural(call.requests, "request")}`;
  const head = el("summary", {}, el("b", {}, call.phase), ` ${call.model} `, el("span.muted", {}, `${tokens} · ${paid} · ${fixed(call.seconds)} s · ${call.finish_reason}`), call.error ? el("span.bad", {}, " " + call.error) : null);
  const card = el("details.call", { id: "call" + number }, head);
  // The texts are the bulk of a page: they are inserted when the call is opened.
  card.addEventListener("toggle", () => {
    if (card.open && card.children.length === 1) {
      card.append(el("h3", {}, "Prompt"), copied(block(text(call.prompt)), text(call.prompt)), el("h3", {}, "Reply"), copied(block(colored(text(call.reply))), text(call.reply)), el("p", {}, el("a", { href: link }, "Link to this call"), el("span.muted", {}, " " + call.id)));
    }
  });
  return card;
}

// ---- list of groups

const filters = { text: "", step: "", ended: "", kind: "", of: "trained" };
const sorting = { by: "", down: false };
const COLUMNS = {
  step: (group) => group.step === null ? -1 : group.step,
  task: (group) => group.task,
  asked: (group) => group.asked,
  criteria: (group) => group.titles.length - group.dropped.length,
  "rollouts by advantage": (group) => (group.split ? group.rollouts.reduce((sum, rollout) => sum + Number(rollout[6] || 0), 0) / group.rollouts.length : Math.max(...group.rollouts.map((rollout) => rollout[2] === null ? -2 : rollout[2]))),
  judge: (group) => group.dollars,
};

const NUMBERS = new Set(["step", "criteria", "judge"]);

function groupsView() {
  const steps = [...new Set(index.groups.filter((group) => !group.split).map((group) => group.step))];
  const measured = [...new Set(index.groups.filter((group) => group.split).map(keyOf))];
  const ends = [...new Set(index.groups.flatMap((group) => group.rollouts.map((rollout) => rollout[1])))].sort();
  const body = el("tbody");
  const count = el("span.muted", { id: "count", role: "status" });
  const more = el("button", { type: "button", id: "more" }, "Show more");
  let shown = PAGE;
  const choose = (name, label, options, all = "all") =>
    el("label", {}, label + " ", el("select", { id: "filter-" + name, onchange: (event) => { filters[name] = event.target.value; shown = PAGE; fill(); } },
      all ? el("option", { value: "" }, all) : null, options.map(([value, text]) => el("option", { value, selected: filters[name] === String(value) }, text))));

  function fill() {
    const wanted = filters.text.toLocaleLowerCase().trim();
    const hits = index.groups.filter((group) => passes(group, wanted));
    const key = COLUMNS[sorting.by];
    if (key) hits.sort((a, b) => { const one = key(a), other = key(b); return (one < other ? -1 : one > other ? 1 : 0) * (sorting.down ? -1 : 1); });
    count.textContent = hits.length === index.groups.length ? plural(hits.length, "group") : `${hits.length} of ${plural(index.groups.length, "group")}`;
    body.replaceChildren(...hits.slice(0, shown).map(groupRow));
    more.hidden = hits.length <= shown;
    for (const head of heads) head.setAttribute("aria-sort", head.dataset.column === sorting.by ? (sorting.down ? "descending" : "ascending") : "none");
  }
  const heads = Object.keys(COLUMNS).filter((name) => name !== "step" || !index.of_traces).map((name) => el("th" + (NUMBERS.has(name) ? ".n" : ""), { scope: "col", "data-column": name }, el("button.sort", { type: "button", onclick: () => {
    sorting.down = sorting.by === name && !sorting.down;
    sorting.by = name;
    fill();
  } }, name)));
  more.addEventListener("click", () => { shown += PAGE; fill(); });
  const bar = el("div.bar", {},
    el("input", { type: "search", id: "filter-text", placeholder: "Task, instruction or criterion", "aria-label": "Task, instruction or criterion", value: filters.text, oninput: (event) => { filters.text = event.target.value; shown = PAGE; fill(); } }),
    measured.length ? choose("of", "rollouts", [["trained", "trained on"], ["evaluated", "held out and evaluated"], ...measured.map((key) => [key, key])]) : null,
    index.of_traces ? null : choose("step", "step", steps.map((step) => [step, step])),
    choose("ended", "ended", ends.map((end) => [end, words(end)])),
    choose("kind", "show", [["signal", "with signal"], ["nosignal", "without signal"], ["active", "credit active"], ["dropped", "with dropped criteria"], ["problem", "with errors"], ["failed", "with failed rollouts"]]),
    count, el("span.spring"), exportButton(() => [`${index.run}-groups.json`, index.groups.filter((group) => passes(group, filters.text.toLocaleLowerCase().trim()))]));
  fill();
  const chips = el("p.muted", {}, "A chip is a rollout. Trained on: its advantage, green above 0, red below." + (measured.length ? " Held out: ✓ solved, ✗ not, or the share of the judge's verdicts that pass." : ""));
  return [el("h1", {}, "Groups"), bar, index.groups.length ? chips : el("p.muted", {}, "No rollout is recorded yet."), el("div.scroll", {}, el("table.list", {}, el("thead", {}, el("tr", {}, heads)), body)), more];
}

const exportButton = (made) => el("button.export", { type: "button", title: "Download what is shown as JSON", onclick: () => { const [name, value] = made(); save(name, JSON.stringify(value, null, 1), "application/json"); } }, "JSON");

function passes(group, wanted) {
  if (filters.of && ((filters.of === "trained") === Boolean(group.split) || (!["trained", "evaluated"].includes(filters.of) && keyOf(group) !== filters.of))) return false;
  if (filters.kind === "failed" && !group.rollouts.some((rollout) => outcomeKind(rollout[6]) === "minus")) return false;
  if (filters.step && String(group.step) !== filters.step) return false;
  if (filters.ended && !group.rollouts.some((rollout) => rollout[1] === filters.ended)) return false;
  if (filters.kind === "signal" && !group.signal) return false;
  if (filters.kind === "nosignal" && group.signal) return false;
  if (filters.kind === "active" && !group.rollouts.some((rollout) => rollout[4] === false)) return false;
  if (filters.kind === "dropped" && !group.dropped.length) return false;
  if (filters.kind === "problem" && !group.failed_calls && group.state !== "failed" && !group.rollouts.some((rollout) => ["crashed", "server_error"].includes(rollout[1]) || (rollout[2] === null && !group.split))) return false;
  return !wanted || [group.task, group.asked, ...group.titles].some((text) => text.toLocaleLowerCase().includes(wanted));
}

// A rollout as a chip: its advantage, or its outcome in a measurement.
function chip(group, [rollout, ended, reward, advantage, , , success], extra = "") {
  const trained = success === undefined;
  const said = trained ? `R ${signed(reward)}, A ${signed(advantage)}` : success === null ? "no result" : typeof success === "number" ? `${percent(success)} of the judge's verdicts pass` : outcomeWord(success, "solved", "not solved");
  return el("a.chip." + (trained ? sign(advantage) : outcomeKind(success)) + extra, { href: rolloutLink(group, rollout), title: `rollout ${rollout}: ${said}, ${words(ended)}` }, trained ? signed(advantage) : outcomeWord(success, "✓", "✗"));
}

function groupRow(group) {
  const kept = group.titles.length - group.dropped.length;
  return el("tr", {},
    index.of_traces ? null : el("td.n", {}, group.split ? keyOf(group) : group.step), el("td", {}, el("a.item", { href: groupLink(group) }, group.task), group.state === "failed" ? el("span.bad", {}, " failed") : null, group.lost ? el("span.bad", {}, ` ${group.lost} lost`) : null),
    el("td.asked", {}, group.asked), el("td.n", { "data-label": "criteria" }, group.split && !group.titles.length ? "–" : group.dropped.length ? `${kept} of ${group.titles.length}` : kept),
    el("td.chips", {}, group.rollouts.map((rollout) => chip(group, rollout))), el("td.n", { "data-label": "judge" }, group.dollars ? "$" + group.dollars.toFixed(3) : "–", group.failed_calls ? el("span.bad", {}, ` ${group.failed_calls} failed`) : null));
}

// ---- one group

const MARKS = "✓ pass, ✗ fail, – not applicable, · no verdict.";
const WORDS = [
  ["R", "the reward: of the criteria that count and apply to the rollout, the share passed minus the share failed."],
  ["A", "the advantage: R minus the group's mean, in standard deviations. Above 0 a rollout is reinforced, below it is pushed away."],
  ["credit", "active: verdicts that differ make some steps weigh more than others. inert: the verdicts that cite its steps agree, so every step weighs the same. Any other word is the reason why there is no step credit."],
];
const STEP_WORDS = [
  ["Q", "of a step: the share of passes among the verdicts that cite it."],
  ["a", "of a step: the advantage of each of its tokens, A distributed by Q."],
  ["push", "of a step: |a| times its tokens, as a share of the rollout's total. It is how much of the update falls on the step."],
];

// A table of verdicts: each rollout's column is wide enough for its mark, however many columns there are.
function matrix(id, columns, ...children) {
  const table = el("table.matrix", { id }, ...children);
  table.style.minWidth = 110 + 36 * columns + "px";
  return table;
}

function neighbours(place, link) {
  const step = (to, text, rel) => (index.groups[to] ? el("a", { href: groupLink(index.groups[to]), rel }, text) : el("span.muted", {}, text));
  return el("nav.crumbs", { "aria-label": "Place" }, el("a", { href: "#groups" }, "Groups"), link, el("span.spring"), el("a", { href: taskLink(index.groups[place].task) }, "this task in all steps"), step(place - 1, "← previous", "prev"), step(place + 1, "next →", "next"));
}

async function groupView(place) {
  const group = index.groups[place];
  const data = await open(place);
  const text = reader(data);
  const rollouts = data.rollouts;
  const judged = rollouts.some((rollout) => rollout.outcome && rollout.outcome.judged);
  const line = (name, cells) => el("tr.sub", {}, el("th", { scope: "row" }, name), cells);
  const head = el("thead", {},
    el("tr", {}, data.criteria.length ? el("th", { scope: "col" }, "criterion") : el("td"), rollouts.map((rollout) => el("th.c", { scope: "col" }, el("a", { href: rolloutLink(group, rollout.rollout), "aria-label": "rollout " + rollout.rollout }, el("span.wideonly", {}, "rollout "), rollout.rollout)))),
    group.split ? [line(judged ? "passed" : "solved", rollouts.map(({ outcome }) => el("td.c." + outcomeKind(outcome && outcome.success), {}, outcomeWord(outcome && outcome.success, "yes", "no")))),
      judged ? null : line("tests passed", rollouts.map((rollout) => el("td.c", {}, rollout.outcome ? rollout.outcome.tests.join(" of ") : "–")))]
    : [line("reward R", rollouts.map((rollout) => el("td.c", {}, rollout.share ? signed(rollout.share.reward) : "unscored"))),
      line("advantage A", rollouts.map((rollout) => el("td.c." + sign(rollout.share && rollout.share.advantage), {}, rollout.share ? signed(rollout.share.advantage) : "–"))),
      line("credit", rollouts.map((rollout) => el("td.c", {}, creditWord(rollout.share))))],
    line("ended", rollouts.map((rollout) => el("td.c", {}, words(rollout.ended)))));
  const rows = data.criteria.map((criterion, number) => el("tr" + (criterion.survived === false ? ".dropped" : ""), {},
    el("td", {}, criterionFold(criterion, number)),
    rollouts.map((rollout) => {
      const verdict = rollout.verdicts[number];
      if (!verdict) return el("td.c.muted", {}, "·");
      const title = `${WORD[verdict[0]]}: ${verdict[2]}`;
      return el("td.c", {}, el("a.verdict." + KIND[verdict[0]], { href: rolloutLink(group, rollout.rollout, "c" + (number + 1)), title, "aria-label": title }, MARK[verdict[0]]));
    })));
  const proposals = data.proposals.length
    ? el("details.card", {}, el("summary", {}, plural(data.proposals.length, "proposal") + " before the union"),
        el("ul", {}, data.proposals.map((proposal) => el("li", {}, el("b", {}, proposal.title), el("span.muted", {}, ` ${proposal.source} `), el("br"), proposal.description))))
    : null;
  return [neighbours(place, null), el("h1", {}, group.task, el("span.muted", {}, ` ${whereOf(group)} · ${group.state}`), " ", exportButton(() => [`${group.task}-${keyOf(group)}.json`, whole(group, data)])),
    data.state.reason ? el("p.bad", {}, data.state.reason) : null,
    ...missing(data.state).map((said) => el("p.bad", {}, said)),
    promptFolds(data, text, (part) => `${groupLink(group)}/${part}`),
    el("section.card", {}, el("h2", {}, group.split && !judged ? "Rollouts" : "Verdicts"), judged ? el("p.muted", {}, `On criteria that do not depend on the policy. ${MARKS} Click a verdict to see its evidence.`) : group.split ? null : el("p.muted", {}, `${MARKS} Struck through: dropped, because no rollout failed it. Click a verdict to see its steps.`),
      group.split ? null : el("details.fold", {}, el("summary", {}, "What R, A and credit are"), WORDS.map(([name, text]) => el("p", {}, el("b", {}, name), " " + text))),
      el("div.scroll", {}, matrix("matrix", rollouts.length, head, el("tbody", {}, rows)))),
    proposals, callList(data.calls, text, groupLink(group))];
}

// Messages about results that are missing in a group.
function missing(state) {
  return [
    state.lost && `${plural(state.lost, "rollout")} lost: the environment failed in every attempt, and no data is kept.`,
    state.unscored && `${plural(state.unscored, "rollout")} unscored and left out of the update: the judge gave no usable reply.`,
    state.credit_failures && `${plural(state.credit_failures, "rollout")} without step credit: the credit call failed, so the advantage is the same on every step.`,
  ].filter(Boolean);
}

// A group for export: line numbers are replaced by the texts.
function whole(group, data) {
  const text = reader(data);
  const written = (entry, names) => ({ ...entry, ...Object.fromEntries(names.filter((name) => entry[name] !== null).map((name) => [name, text(entry[name])])) });
  const calls = (list) => list.map((call) => written(call, ["prompt", "reply"]));
  const { lines, ...rest } = data;
  return { run: index.run, step: group.step, task: group.task, ...(group.split ? { evaluation: group.key, split: group.split } : {}), ...rest, prompt: data.prompt.map((message) => written(message, ["text"])), calls: calls(data.calls),
    rollouts: data.rollouts.map((rollout) => ({ ...rollout, turns: rollout.turns.map((turn) => written(turn, ["before", "action", "after", "observation"])), calls: calls(rollout.calls) })) };
}

function creditWord(share) {
  if (!share) return "–";
  if (share.fallback !== "none") return words(share.fallback);
  return share.inert ? "inert" : "active";
}

function criterionFold(criterion, number) {
  return el("details.criterion", {}, el("summary", {}, `${number + 1}. `, criterion.survived === false ? el("s", {}, criterion.title) : criterion.title),
    el("p", {}, criterion.description), el("p.muted", {}, criterion.evaluator_instruction), criterion.source ? el("p.muted", {}, "from " + criterion.source) : null);
}

// ---- one rollout

async function rolloutView(place, number, rest) {
  const group = index.groups[place];
  const data = await open(place);
  const text = reader(data);
  const rollout = data.rollouts.find((one) => one.rollout === number);
  if (!rollout) return [el("p", {}, "No such rollout.")];
  const here = (part) => rolloutLink(group, number, part);
  const share = rollout.share;
  // By position, not by number: a lost rollout leaves a gap in the numbers.
  const mine = data.rollouts.indexOf(rollout);
  const others = el("span.chips", {}, data.rollouts.map((one, at) => el("a.chip." + (one.outcome === undefined ? sign(one.share && one.share.advantage) : outcomeKind(one.outcome && one.outcome.success)) + (one === rollout ? ".here" : ""), { href: rolloutLink(group, one.rollout), "aria-label": "rollout " + one.rollout, "aria-current": one === rollout ? "page" : null, rel: at === mine + 1 ? "next" : at === mine - 1 ? "prev" : null }, one.rollout)));
  const turns = el("div.turns", {}, rollout.turns.map((turn, order) => turnCard(turn, order, text, here, share)));
  const failures = rollout.outcome && rollout.outcome.failures && rollout.outcome.failures.length ? [el("h3", {}, "Tests that failed"), el("ul", {}, rollout.outcome.failures.map((one) => el("li", {}, one)))] : null;
  const judged = rollout.outcome && rollout.outcome.judged;
  const unscored = typeof judged === "string" ? el("p.bad", {}, `Not scored: ${judged}`) : null;
  const panel = el("aside.panel", { "aria-label": "Verdicts" }, group.split && !judged ? [el("h2", {}, "Evaluated"), el("p", {}, !rollout.outcome ? "No result." : `${rollout.outcome.success ? "Solved" : "Not solved"}: ${rollout.outcome.tests.join(" of ")} tests passed.`), failures]
    : [el("h2", {}, "Verdicts"), unscored, el("ol.verdicts", {}, data.criteria.map((criterion, at) => verdictItem(group, criterion, at, rollout, here))), el("div", { id: "why" })]);
  return [neighbours(place, [" › ", el("a", { href: groupLink(group) }, `${group.task}, ${whereOf(group)}`), " › ", others]),
    el("h1", {}, (rollout.trace && rollout.trace.trace_id) || `${index.of_traces ? "Trace" : "Rollout"} ${number}`, rollout.trace ? el("span.muted", {}, " " + rollout.trace.source) : null, el("span.muted.onprint", {}, ` ${group.task}, ${whereOf(group)}`), rollout.error ? el("span.bad", {}, " " + rollout.error) : null, " ", besideChoice(group, number), " ", exportButton(() => [`${group.task}-${keyOf(group)}-${number}.json`, { ...whole(group, { ...data, rollouts: [rollout], calls: [] }) }])),
    rolloutFacts(rollout),
    pushStrip(rollout, here, share),
    el("div.columns", {}, el("div", {}, promptFolds(data, text, here), turns, callList(rollout.calls, text, here(""))), panel)];
}

function rolloutFacts(rollout) {
  const share = rollout.share;
  const judged = rollout.outcome !== undefined ? [[rollout.outcome && rollout.outcome.judged ? "passed" : "solved", outcomeWord(rollout.outcome && rollout.outcome.success, "yes", "no")]]
    : [["reward R", share ? signed(share.reward) : "unscored"], ["advantage A", share ? signed(share.advantage) : "–"], ["credit", creditWord(share)]];
  const facts = [...judged,
    ["ended", words(rollout.ended)], ["steps", rollout.turns.filter((turn) => turn.step !== null).length],
    [index.of_traces ? "tokens" : "sampled tokens", rollout.turns.reduce((sum, turn) => sum + turn.tokens, 0)],
    ...(index.of_traces ? [] : [["seconds", fixed(rollout.seconds, 1)], ["policy version", rollout.policy_version]])];
  return el("dl.facts", {}, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// Each step's share of the trajectory's push, in order; gaps and uncited steps in grey.
function pushStrip(rollout, here, share) {
  if (!share) return null;
  const kinds = [["plus", "reinforced"], ["minus", "pushed away"], ["uncited", "no verdict cites it"], ["gap", "no push"]];
  const legend = el("p.legend", {}, "Share of the push by step: ", kinds.flatMap(([kind, name]) => [el("i." + kind), " " + name + " "]));
  const largest = Math.max(...rollout.turns.map((turn) => turn.push || 0), 1e-9);
  const columns = rollout.turns.map((turn, order) => {
    const gap = turn.step === null;
    const tall = gap ? 0 : Math.round(((turn.push || 0) / largest) * 46);
    const bar = el("i." + barKind(turn));
    bar.style.height = Math.max(tall, 2) + "px";
    const title = gap ? (turn.role === "assistant" ? "a turn without a step" : turn.role) : `step ${turn.step}: ${percent(turn.push)} of the push, Q ${fixed(turn.quality)}, ${turn.tokens} tokens${turn.cited ? "" : ", not cited"}`;
    return el("a.column", { href: here("t" + (order + 1)), title, "aria-label": title, "data-step": turn.step }, bar, el("span", {}, gap ? "·" : turn.step));
  });
  return el("figure.push", {}, legend, el("div.strip", { role: "group", "aria-label": "share of the push by step" }, columns),
    el("details.fold", {}, el("summary", {}, "What push, Q and a are"), STEP_WORDS.map(([name, text]) => el("p", {}, el("b", {}, name), " " + text))));
}

const barKind = (turn) => (turn.step === null || !turn.push || sign(turn.advantage) === "zero" ? "gap" : sign(turn.advantage) + (turn.cited ? "" : ".uncited"));

function turnCard(turn, order, text, here, share, prefix = "t") {
  const gap = turn.step === null;
  const head = el("header", {}, el("a.anchor", { href: here("t" + (order + 1)), title: "Link to this message" }, gap ? (turn.role === "assistant" ? `Turn ${order + 1}` : turn.role) : `Step ${turn.step}`));
  if (!gap && share) {
    const bar = el("i." + barKind(turn));
    bar.style.width = Math.round((turn.push || 0) * 100) + "%";
    head.append(el("span.track", { title: "share of the trajectory's push" }, bar), el("span.push", {}, percent(turn.push)), el("span", { title: "quality: the share of passes among the verdicts that cite it" }, "Q ", el("b", {}, fixed(turn.quality))), el("span", { title: "advantage of each of its tokens" }, "a ", el("b", {}, signed(turn.advantage))));
    if (!turn.cited) head.append(el("span.tag", {}, "not cited"));
  }
  head.append(el("span.spring"), el("span.muted", {}, plural(turn.tokens, "token") + (index.of_traces ? "" : ` · ${fixed(turn.generating)} s generating, ${fixed(turn.executing)} s executing`)));
  const before = text(turn.before), after = text(turn.after), output = text(turn.observation);
  return el("article.turn" + (gap ? ".isgap" : turn.cited || !share ? "" : ".isuncited"), { id: prefix + (order + 1), "data-step": turn.step }, head,
    before ? folded(turn.action === null ? "Message" : "Reasoning", before, { open: true, kind: "reasoning" }) : null,
    turn.action ? copied(el("pre.code", { tabindex: "0" }, colored(text(turn.action))), text(turn.action)) : null,
    after ? folded("After the action", after, { kind: "reasoning" }) : null,
    turn.sampled ? tokenFold(turn) : null,
    turn.observation !== null ? folded("Output", output, { open: output.length < 1500, kind: "output" }) : null);
}

// The sampled tokens, highlighted more where the policy was less sure; they are inserted when opened.
function tokenFold(turn) {
  const fold = el("details.fold.tokens", {}, el("summary", {}, "Sampled tokens"));
  fold.addEventListener("toggle", () => {
    if (!fold.open || fold.children.length > 1) return;
    const advantage = turn.advantage === undefined ? "no advantage" : `advantage ${signed(turn.advantage, 3)}`;
    fold.append(block(turn.sampled.map(([token, logprob]) => {
      const node = el("span.token." + (turn.advantage === undefined ? "zero" : sign(turn.advantage)), { title: `${JSON.stringify(token)}, log-probability ${fixed(logprob, 3)}, ${advantage}` }, token);
      node.style.setProperty("--unsure", Math.round(100 * (1 - Math.exp(logprob))) + "%");
      return node;
    })));
  });
  return fold;
}

function verdictItem(group, criterion, at, rollout, here) {
  const verdict = rollout.verdicts[at];
  const credit = rollout.credit[at];
  const value = verdict ? verdict[0] : null;
  const differs = verdict && credit && credit.verdict !== value;
  return el("li" + (criterion.survived === false ? ".dropped" : ""), {},
    el("a.row", { href: here("c" + (at + 1)), id: "c" + (at + 1), "data-steps": credit ? credit.steps.join(",") : "" },
      el("span.verdict." + (value === null ? "na" : KIND[value]), {}, value === null ? "·" : MARK[value]),
      el("span", {}, criterion.survived === false ? el("s", {}, criterion.title) : criterion.title, differs ? el("em.tag", {}, `credit call: ${WORD[credit.verdict]}`) : null, group.split ? null : labelTag(labels.kept.get(labelKey(group, rollout.rollout, at)))),
      el("span.muted.steps", {}, credit && credit.steps.length ? plural(credit.steps.length, "step") : "")));
}

function choose(at, group, data, number, scroll) {
  const rollout = data.rollouts.find((one) => one.rollout === number);
  if (!rollout) return;
  const criterion = data.criteria[at];
  const view = document.getElementById("rollout");
  for (const node of view.querySelectorAll(".lit, .chosen")) node.classList.remove("lit", "chosen");
  const why = document.getElementById("why");
  if (!criterion) return why && why.replaceChildren();
  document.getElementById("c" + (at + 1)).classList.add("chosen");
  const verdict = rollout.verdicts[at];
  const credit = rollout.credit[at];
  const here = (part) => rolloutLink(group, number, part);
  const steps = new Set((credit ? credit.steps : []).map(String));
  const cited = [...view.querySelectorAll("[data-step]")].filter((node) => steps.has(node.dataset.step));
  for (const node of cited) node.classList.add("lit", verdict ? KIND[verdict[0]] : "na");
  why.replaceChildren(el("section.why", {}, el("h3", {}, criterion.title), el("p", {}, criterion.description),
    verdict ? [el("h4", {}, "Verdict: " + WORD[verdict[0]]), el("p", {}, withSteps(verdict[2], rollout, here)), el("h4", {}, "Evidence"), el("p", {}, verdict[1] ? withSteps(verdict[1], rollout, here) : "–")] : el("p", {}, "Not scored."),
    credit ? [el("h4", {}, "Steps responsible"), el("p", {}, credit.steps.length ? withSteps((credit.steps.length > 1 ? "steps " : "step ") + credit.steps.join(", "), rollout, here) : "none cited"), el("p", {}, withSteps(credit.explanation, rollout, here))] : group.split ? null : el("p.muted", {}, "The credit call did not mention it."),
    verdict && !group.split ? labelForm(group, data, rollout, at) : null,
    criterion.evaluator_instruction ? el("details", {}, el("summary", {}, "How it is to be judged"), el("p", {}, criterion.evaluator_instruction)) : null));
  const card = cited.find((node) => node.classList.contains("turn"));
  if (scroll && card) card.scrollIntoView({ block: "center" });
}

const reader = (data) => (numbers) => (numbers ? numbers.map((number) => data.lines[number]).join("\n") : "");

