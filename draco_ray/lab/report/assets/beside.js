// ---- a task in all steps, and two rollouts side by side

// Criteria with equal titles are the same; case and spacing are ignored.
const titleKey = (title) => title.toLocaleLowerCase().split(/\s+/).join(" ").trim();

async function taskView(task) {
  const places = index.groups.map((group, place) => [group, place]).filter(([group]) => group.task === task);
  if (!places.length) return [el("p", {}, "No such task in this report.")];
  const trained = places.filter(([group]) => !group.split);
  const asked = places[0][0].asked;
  const rows = places.map(([group]) => el("tr", {}, el("td", {}, el("a.item", { href: groupLink(group) }, whereOf(group))), el("td.chips", {}, group.rollouts.map((rollout) => chip(group, rollout)))));
  const counts = new Map(), proposed = new Map();
  for (const [group, place] of trained) {
    const data = await open(place);
    data.criteria.forEach((criterion, at) => {
      const key = titleKey(criterion.title);
      if (!counts.has(key)) counts.set(key, { title: criterion.title, of: new Map() });
      const verdicts = data.rollouts.map((rollout) => rollout.verdicts[at]).filter(Boolean).map((verdict) => verdict[0]);
      counts.get(key).of.set(group, [verdicts.filter((verdict) => verdict === 1).length, verdicts.filter((verdict) => verdict !== 0).length, criterion.survived === false]);
    });
    proposed.set(group, new Set(data.proposals.map((proposal) => titleKey(proposal.title))));
  }
  const body = [...counts].map(([key, { title, of }]) => el("tr", {}, el("th", { scope: "row" }, title), trained.map(([group]) => {
    const found = of.get(group);
    if (!found) return proposed.get(group).has(key) ? el("td.c.muted", { title: "proposed, and in no rubric of this step" }, "✓") : el("td.c.muted", { title: "not proposed in this step" }, "·");
    const [passed, applied, dropped] = found;
    return el("td.c." + (!applied ? "muted" : passed * 2 >= applied ? "plus" : "minus"), { title: dropped ? "dropped: no rollout failed it" : null }, el("a", { href: groupLink(group) }, (dropped ? "✓ " : "") + (applied ? `${passed} of ${applied}` : "–")));
  })));
  return [el("nav.crumbs", { "aria-label": "Place" }, el("a", { href: "#groups" }, "Groups")), el("h1", {}, task, el("span.muted", {}, " in all steps")), el("p", {}, asked),
    el("section.card", {}, el("h2", {}, "Rollouts"), el("div.scroll", {}, el("table", {}, el("tbody", {}, rows)))),
    counts.size ? el("section.card", {}, el("h2", {}, "Passed, of those to which the criterion applied"),
      el("p.muted", {}, "✓ with a number: dropped, because no rollout failed it. ✓ alone: proposed but left out of the rubric, because no rollout failed it or another criterion covers it. ·: not proposed in that step. A criterion that counts is never passed by all rollouts."),
      el("div.scroll", {}, matrix(null, trained.length, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "criterion"), trained.map(([group]) => el("th.c", { scope: "col" }, el("span.wideonly", {}, "step "), String(group.step))))), el("tbody", {}, body)))) : null];
}

// Other rollouts of the task, of this group first, then of other steps and of evaluations.
function besideChoice(group, number) {
  const others = [group, ...index.groups.filter((other) => other.task === group.task && other !== group)]
    .flatMap((other) => other.rollouts.filter((rollout) => other !== group || rollout[0] !== number).map((rollout) => [other, rollout[0]]));
  if (!others.length) return null;
  return el("label.beside", {}, "beside ", el("select", { id: "beside-with", onchange: (event) => { if (event.target.value) location.hash = event.target.value.slice(1); } },
    el("option", { value: "" }, "another rollout"), others.map(([other, its]) => el("option", { value: besideLink(group, number, other, its) }, `${other === group ? "" : whereOf(other) + ", "}rollout ${its}`))));
}

async function besideView(ends) {
  const sides = [];
  for (const [key, task, number] of ends) {
    const place = findGroup(key, task);
    const data = place < 0 ? null : await open(place);
    const rollout = data && data.rollouts.find((one) => one.rollout === Number(number));
    if (!rollout) return [el("p", {}, "No such rollouts in this report.")];
    sides.push({ group: index.groups[place], data, rollout });
  }
  const titles = new Map();
  sides.forEach(({ data, rollout }, side) => data.criteria.forEach((criterion, at) => {
    const key = titleKey(criterion.title);
    if (!titles.has(key)) titles.set(key, [criterion.title, [null, null]]);
    titles.get(key)[1][side] = rollout.verdicts[at] ? [at, rollout.verdicts[at]] : null;
  }));
  const verdict = (found, { group, rollout }) => (found ? el("a.verdict." + KIND[found[1][0]], { href: rolloutLink(group, rollout.rollout, "c" + (found[0] + 1)), title: found[1][2], "aria-label": `${WORD[found[1][0]]}: ${found[1][2]}` }, MARK[found[1][0]]) : el("span.muted", {}, "·"));
  const name = ({ group, rollout }) => el("a", { href: rolloutLink(group, rollout.rollout) }, `${group.task}, ${whereOf(group)}, rollout ${rollout.rollout}`);
  const columns = sides.map((side, place) => {
    const here = (part) => rolloutLink(side.group, side.rollout.rollout, part);
    return el("section.side", { "aria-label": place ? "second rollout" : "first rollout" }, el("h2", {}, name(side)), rolloutFacts(side.rollout), pushStrip(side.rollout, here, side.rollout.share),
      side.rollout.turns.map((turn, order) => turnCard(turn, order, reader(side.data), here, side.rollout.share, "ab"[place])));
  });
  return [el("nav.crumbs", { "aria-label": "Place" }, el("a", { href: "#groups" }, "Groups"), " › ", el("a", { href: taskLink(sides[0].group.task) }, sides[0].group.task)), el("h1", {}, "Two rollouts"),
    titles.size ? el("section.card", {}, el("h2", {}, "Verdicts"), el("div.scroll", {}, el("table.matrix", { id: "both" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "criterion"), sides.map((side) => el("th.c", { scope: "col" }, `${whereOf(side.group)}, rollout ${side.rollout.rollout}`)))),
      el("tbody", {}, [...titles.values()].map(([title, found]) => el("tr" + (found[0] && found[1] && found[0][1][0] !== found[1][1][0] ? ".differs" : ""), {}, el("th", { scope: "row" }, title), sides.map((side, place) => el("td.c", {}, verdict(found[place], side))))))))) : null,
    el("div.sides", {}, columns)];
}

