// ---- search: who said it (role), and where (scope)

const ROLES = [["", "all but judge prompts"], ["agent", "agent"], ["environment", "environment"], ["task", "task and system"], ["reply", "judge replies"], ["prompt", "judge prompts"]];
const MOST_HITS = 300, MOST_TASKS = 300;
const foundLink = (query, role, scope) => "found/" + [query, role, scope].map(encodeURIComponent).join("/");

function foundHead(query, role, scope) {
  const tasks = [...new Set(index.groups.map((group) => group.task))];
  const scopes = [["", "the whole run"], ["trained", "rollouts trained on"], ["evaluated", "evaluated rollouts"], ...[...new Set(index.groups.map(keyOf))].map((key) => ["at " + key, whereOf(index.groups.find((group) => keyOf(group) === key))]),
    ...(tasks.length > MOST_TASKS ? [] : tasks.map((task) => ["task " + task, task]))];
  const choice = (id, label, options, value, link) => el("label", {}, label + " ", el("select", { id, onchange: (event) => { location.hash = link(event.target.value); } }, options.map(([name, text]) => el("option", { value: name, selected: name === value }, text))));
  return [el("h1", {}, "Messages with “", query, "”"), el("div.bar", {}, choice("found-role", "said by", ROLES, role, (name) => foundLink(query, name, scope)), choice("found-scope", "in", scopes, scope, (name) => foundLink(query, role, name)))];
}

const inScope = (group, scope) => !scope || (scope === "trained" ? !group.split : scope === "evaluated" ? Boolean(group.split) : scope.startsWith("at ") ? keyOf(group) === scope.slice(3) : group.task === scope.slice(5));

async function foundView(query, role, scope, mine) {
  // Match the text itself, not a lower-case copy: a letter may be longer in lower case, which shifts positions.
  const wanted = new RegExp(query.replace(/[\\^$.*+?()[\]{}|\/]/g, "\\$&"), "iu");
  const list = el("ul.hits"), state = el("p.muted", { id: "found-state", role: "status" });
  document.getElementById("found").replaceChildren(...foundHead(query, role, scope), state, list);
  const asks = (name) => (role ? role === name : name !== "prompt");
  let hits = 0;
  for (let place = 0; place < index.groups.length && hits < MOST_HITS; place++) {
    const group = index.groups[place];
    if (!inScope(group, scope)) continue;
    const data = await inflate("g" + place);
    if (mine !== ticket) return;
    const lines = new Set();
    data.lines.forEach((line, number) => { if (wanted.test(line)) lines.add(number); });
    const note = (who, link, where, numbers) => {
      if (!asks(who)) return;
      const line = (numbers || []).find((number) => lines.has(number));
      if (line === undefined || hits >= MOST_HITS) return;
      hits++;
      list.append(el("li", {}, el("a.item", { href: link }, `${whereOf(group)} · ${group.task} · ${where}`), snippet(data.lines[line], wanted)));
    };
    if (lines.size) {
      data.prompt.forEach((message, at) => note("task", `${groupLink(group)}/p${at + 1}`, `${message.role} message`, message.text));
      data.calls.forEach((call, at) => { const link = `${groupLink(group)}/call${at + 1}`; note("prompt", link, `${call.phase} prompt`, call.prompt); note("reply", link, `${call.phase} reply`, call.reply); });
      for (const rollout of data.rollouts) {
        const said = new Set(rollout.turns.flatMap((turn) => [turn.before, turn.action, turn.after, turn.observation].flatMap((part) => part || [])));
        rollout.turns.forEach((turn, at) => {
          const link = rolloutLink(group, rollout.rollout, "t" + (at + 1)), where = `rollout ${rollout.rollout}, turn ${at + 1}`;
          // Messages of others in an agent's conversation are turns of their own.
          note(turn.role === "assistant" ? "agent" : "environment", link, turn.role === "assistant" ? where : `${where}, ${turn.role}`, [turn.before, turn.action, turn.after].flatMap((part) => part || []));
          note("environment", link, `${where}, output`, turn.observation);
        });
        rollout.calls.forEach((call, at) => {
          const link = rolloutLink(group, rollout.rollout, `call${at + 1}`);
          // A prompt repeats the trajectory: skip lines that were found there already.
          note("prompt", link, `rollout ${rollout.rollout}, ${call.phase} prompt`, (call.prompt || []).filter((number) => !said.has(number)));
          note("reply", link, `rollout ${rollout.rollout}, ${call.phase} reply`, call.reply);
        });
      }
    }
    if (place % 20 === 0) state.textContent = `${hits} found, ${place + 1} of ${index.groups.length} groups searched`;
  }
  state.textContent = hits >= MOST_HITS ? `The first ${MOST_HITS} messages; search for something rarer.` : `${plural(hits, "message")} found.`;
}

function snippet(line, wanted) {
  const { index: at, 0: hit } = wanted.exec(line);
  const from = Math.max(0, at - 60), end = at + hit.length;
  return el("p", {}, from ? "…" : "", line.slice(from, at), el("mark", {}, hit), line.slice(end, end + 160));
}

