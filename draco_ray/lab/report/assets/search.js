// ---- search through every message

async function foundView(query, mine) {
  // On the text itself: a lower-case letter can be longer than its capital, and places would shift.
  const wanted = new RegExp(query.replace(/[\\^$.*+?()[\]{}|\/]/g, "\\$&"), "iu");
  const list = el("ul.hits"), state = el("p.muted", { id: "found-state" });
  const box = document.getElementById("found");
  box.replaceChildren(el("h1", {}, "Messages with “", query, "”"), state, list);
  let hits = 0;
  for (let place = 0; place < index.groups.length && hits < 300; place++) {
    const data = await inflate("g" + place);
    if (mine !== ticket) return;
    const group = index.groups[place];
    const lines = new Set();
    data.lines.forEach((line, number) => { if (wanted.test(line)) lines.add(number); });
    const note = (link, where, numbers) => {
      const line = (numbers || []).find((number) => lines.has(number));
      if (line === undefined || hits >= 300) return;
      hits++;
      list.append(el("li", {}, el("a", { href: link }, `step ${group.step} · ${group.task} · ${where}`), snippet(data.lines[line], wanted)));
    };
    if (lines.size) {
      data.prompt.forEach((message, at) => note(`${groupLink(group)}/p${at + 1}`, `${message.role} message`, message.text));
      data.calls.forEach((call, at) => { const link = `${groupLink(group)}/call${at + 1}`; note(link, `${call.phase} prompt`, call.prompt); note(link, `${call.phase} reply`, call.reply); });
      for (const rollout of data.rollouts) {
        const said = new Set(rollout.turns.flatMap((turn) => [turn.before, turn.action, turn.after, turn.observation].flatMap((part) => part || [])));
        rollout.turns.forEach((turn, at) => note(rolloutLink(group, rollout.rollout, "t" + (at + 1)), `rollout ${rollout.rollout}, turn ${at + 1}`, [turn.before, turn.action, turn.after, turn.observation].flatMap((part) => part || [])));
        rollout.calls.forEach((call, at) => {
          const link = rolloutLink(group, rollout.rollout, `call${at + 1}`);
          // A prompt repeats the trajectory: what is in that was found there.
          note(link, `rollout ${rollout.rollout}, ${call.phase} prompt`, (call.prompt || []).filter((number) => !said.has(number)));
          note(link, `rollout ${rollout.rollout}, ${call.phase} reply`, call.reply);
        });
      }
    }
    if (place % 20 === 0) state.textContent = `${hits} found, ${place + 1} of ${index.groups.length} groups searched`;
  }
  state.textContent = hits >= 300 ? "The first 300; search for something rarer." : `${plural(hits, "message")} found.`;
}

function snippet(line, wanted) {
  const { index: at, 0: hit } = wanted.exec(line);
  const from = Math.max(0, at - 60), end = at + hit.length;
  return el("p", {}, from ? "…" : "", line.slice(from, at), el("mark", {}, hit), line.slice(end, end + 160));
}

