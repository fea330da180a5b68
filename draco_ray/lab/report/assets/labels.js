// ---- people's labels of verdicts: stored in the browser, exported as JSON lines

const labels = { kept: new Map(), by: "", drawn: new Set() };
const labelKey = (group, rollout, criterion) => [group.step, group.task, rollout, criterion].join("\n");
const labelPlace = () => "draco-labels " + index.id;

function readLabels() {
  try {
    const stored = JSON.parse(localStorage.getItem(labelPlace()) || "{}");
    labels.by = stored.by || "";
    labels.drawn = new Set(stored.drawn || []);
    for (const label of stored.labels || []) if (labelFits(label)) keepLabel(label);
  } catch {
    // The browser may forbid storage, or the stored text may be invalid: labels then last for this visit only.
  }
}

function storeLabels() {
  try {
    localStorage.setItem(labelPlace(), JSON.stringify({ by: labels.by, drawn: [...labels.drawn], labels: [...labels.kept.values()] }));
  } catch {
    // As above; the list of labels says how many there are to export.
  }
}

// A run of the same name and configuration may have been made again since.
const groupOf = (label) => index.groups.find((one) => one.step === label.training_step && one.task === label.task_id);
const labelFits = (label) => label.run_id === index.id && groupOf(label) !== undefined && groupOf(label).titles[label.criterion] === label.title;
const keepLabel = (label) => labels.kept.set([label.training_step, label.task_id, label.rollout, label.criterion].join("\n"), label);

function labelTag(label) {
  if (!label) return null;
  const wrong = (label.verdict !== null && label.verdict !== label.judge) || label.citation === false;
  return el("em.tag.label" + (wrong ? ".bad" : ""), {}, wrong ? "marked wrong" : "marked right");
}

function labelForm(group, data, rollout, at) {
  const key = labelKey(group, rollout.rollout, at);
  const criterion = data.criteria[at], [judged, evidence, justification] = rollout.verdicts[at];
  const credit = rollout.credit[at];
  const form = el("form.label", { id: "label", "aria-label": "Is this right?", onsubmit: (event) => event.preventDefault() });
  if (labels.kept.has(key) && labels.kept.get(key).judge !== judged) labels.kept.delete(key);
  const now = () => labels.kept.get(key) || {
    run: index.run, run_id: index.id, training_step: group.step, task_id: group.task, rollout: rollout.rollout, criterion: at,
    title: criterion.title, description: criterion.description, evaluator_instruction: criterion.evaluator_instruction, task: group.asked,
    judge: judged, evidence: evidence || "", justification: justification || "", verdict: null, cited: credit ? credit.steps : [], citation: null, steps: null,
    rollout_steps: rollout.turns.filter((turn) => turn.step !== null).length,
    note: "", by: labels.by, drawn: labels.drawn.has(key) };

  function change(values) {
    const label = { ...now(), ...values, by: labels.by };
    if (label.citation !== false) label.steps = null;
    if (label.verdict === null && label.citation === null) labels.kept.delete(key);
    else labels.kept.set(key, label);
    storeLabels();
    fill();
    const row = document.getElementById("c" + (at + 1));
    for (const tag of row ? row.querySelectorAll(".tag.label") : []) tag.remove();
    const tag = labelTag(labels.kept.get(key));
    if (row && tag) row.children[1].append(tag);
  }

  function choice(name, value, text) {
    const pressed = now()[name] === value;
    return el("button" + (pressed ? ".pressed" : ""), { type: "button", "data-label": `${name} ${value}`, "aria-pressed": String(pressed), onclick: () => change({ [name]: pressed ? null : value }) }, text);
  }

  function fill() {
    const label = now();
    const focused = document.activeElement && form.contains(document.activeElement) ? document.activeElement.dataset.label : null;
    const parts = [
      el("h4", {}, "Is the verdict right?"),
      el("p", {}, [judged, 1, -1, 0].filter((value, place, all) => all.indexOf(value) === place).map((value) => choice("verdict", value, value === judged ? "right" : "wrong: " + WORD[value]))),
      credit && credit.steps.length ? [el("h4", {}, "Are these the steps?"), el("p", {}, choice("citation", true, "right"), choice("citation", false, "wrong"))] : null,
      label.citation === false ? el("label", {}, "The right steps, if you know ", el("input", { id: "label-steps", size: 10, placeholder: "2, 5", value: (label.steps || []).join(", "),
        onchange: (event) => { const steps = (event.target.value.match(/\d+/g) || []).map(Number).filter((step) => rollout.turns.some((turn) => turn.step === step)); change({ steps: steps.length ? [...new Set(steps)].sort((a, b) => a - b) : null }); } })) : null,
      labels.kept.has(key) ? el("label", {}, "Why ", el("input", { id: "label-note", size: 28, placeholder: "shown to a judge as an example", value: label.note, onchange: (event) => change({ note: event.target.value }) })) : null];
    form.replaceChildren(...parts.flat().filter(Boolean));
    if (focused) (form.querySelector(`[data-label="${focused}"]`) || form).focus();
  }
  fill();
  return form;
}

const labelLines = () => [...labels.kept.values()].map((label) => JSON.stringify(label) + "\n").join("");

function save(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

async function importLabels(file) {
  let taken = 0, left = 0;
  for (const line of (await file.text()).split("\n").filter((text) => text.trim())) {
    let label = null;
    try {
      label = JSON.parse(line);
    } catch {
      // Counted below.
    }
    if (label && labelFits(label)) { keepLabel(label); taken++; }
    else left++;
  }
  storeLabels();
  document.getElementById("labels").replaceChildren(...labelsView());
  document.getElementById("labels-state").textContent = `${plural(taken, "label")} taken${left ? `, ${plural(left, "line")} not of this run` : ""}.`;
}

// Draw one of the scored verdicts without a label, each with the same chance.
async function drawOne() {
  const open_ = index.groups.filter((group) => !group.split).flatMap((group) => group.rollouts.filter((rollout) => rollout[2] !== null).flatMap((rollout) => group.titles.map((_, at) => [group, rollout[0], at])))
    .filter(([group, rollout, at]) => !labels.kept.has(labelKey(group, rollout, at)));
  while (open_.length) {
    const [[group, rollout, at]] = open_.splice(Math.floor(Math.random() * open_.length), 1);
    const data = await open(index.groups.indexOf(group));
    const found = data.rollouts.find((one) => one.rollout === rollout);
    if (!found || !found.verdicts[at]) continue;
    labels.drawn.add(labelKey(group, rollout, at));
    storeLabels();
    location.hash = rolloutLink(group, rollout, "c" + (at + 1)).slice(1);
    return;
  }
  document.getElementById("labels-state").textContent = "Every verdict is labelled.";
}

function labelsView() {
  const all = [...labels.kept.values()];
  const wrong = (label) => label.verdict !== null && label.verdict !== label.judge;
  const rows = all.map((label) => el("tr", {},
    el("td.n", {}, label.training_step), el("td", {}, el("a.item", { href: `#rollout/${label.training_step}/${encodeURIComponent(label.task_id)}/${label.rollout}/c${label.criterion + 1}` }, `${label.task_id}, rollout ${label.rollout}`)),
    el("td.asked", {}, label.title), el("td", {}, WORD[label.judge]), el("td" + (wrong(label) ? ".minus" : ""), {}, label.verdict === null ? "–" : WORD[label.verdict]),
    el("td", {}, label.citation === null ? "–" : label.citation ? "right" : "wrong" + (label.steps ? ": " + label.steps.join(", ") : "")), el("td.asked", {}, label.note)));
  return [el("h1", {}, "Labels"),
    el("p", {}, "Open a rollout's verdict to mark it, and the steps it cites, right or wrong. ", el("code", {}, "draco agreement labels.jsonl"), " measures the judge against the exported labels. Rates hold for the whole run only if verdicts are drawn, not chosen. Labels stay in this browser until exported."),
    el("div.bar", {},
      el("label", {}, "Your name ", el("input", { id: "label-by", size: 14, value: labels.by, onchange: (event) => { labels.by = event.target.value.trim(); storeLabels(); } })),
      el("button", { type: "button", id: "label-draw", onclick: drawOne }, "Draw a verdict to label"),
      el("button", { type: "button", id: "label-export", disabled: !all.length, onclick: () => save("labels.jsonl", labelLines(), "application/jsonl") }, `Export ${plural(all.length, "label")}`),
      el("label", {}, "Import ", el("input", { type: "file", id: "label-import", accept: ".jsonl", onchange: (event) => event.target.files.length && importLabels(event.target.files[0]) })),
      el("span.muted", { id: "labels-state", role: "status" })),
    all.length ? el("div.scroll", {}, el("table.list", {}, el("thead", {}, el("tr", {}, ["step", "rollout", "criterion", "judge", "right verdict", "citation", "why"].map((name) => el("th", {}, name)))), el("tbody", {}, rows))) : null];
}

