// ---- where we are

let standing = "";

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function route() {
  const mine = ++ticket;
  const [view, step, task, ...rest] = location.hash.slice(1).split("/").map(decoded);
  const name = ["groups", "group", "rollout", "found", "labels"].includes(view) ? view : "overview";
  let place = -1;
  if (name === "group" || name === "rollout") place = index.groups.findIndex((group) => String(group.step) === step && group.task === task);
  const key = name === "rollout" ? `${name}/${step}/${task}/${rest[0]}` : name === "overview" ? name : location.hash.replace(/\/(call|p)\d+$/, "");
  const part = name === "rollout" ? rest[1] : rest[0];
  if (standing !== key) {
    const box = document.getElementById(name);
    if (name === "groups") box.replaceChildren(...groupsView());
    else if (name === "labels") box.replaceChildren(...labelsView());
    else if (name === "found") foundView(step || "", mine);
    else if (name !== "overview") {
      const content = place < 0 ? [el("p", {}, "No such group in this report.")] : name === "group" ? await groupView(place) : await rolloutView(place, Number(rest[0]), rest[1]);
      if (mine !== ticket) return;
      box.replaceChildren(...content.filter(Boolean));
    }
    for (const section of document.querySelectorAll(".view")) section.hidden = section.id !== name;
    for (const link of document.querySelectorAll("header nav a")) link.classList.toggle("here", link.dataset.view === (["overview", "labels"].includes(name) ? name : "groups"));
    standing = key;
    window.scrollTo(0, 0);
  }
  if (name === "rollout" && place >= 0) choose(part && part[0] === "c" && part.slice(0, 4) !== "call" ? Number(part.slice(1)) - 1 : -1, index.groups[place], await open(place), Number(rest[0]), true);
  if (part && /^(t|p|call)\d+$/.test(part)) {
    const target = document.querySelector(`#${name} [id="${part}"]`);
    if (target) {
      if (target.tagName === "DETAILS") target.open = true;
      target.scrollIntoView({ block: "start" });
      for (const node of document.querySelectorAll(".target")) node.classList.remove("target");
      target.classList.add("target");
    }
  }
  document.body.dataset.ready = location.hash || "#overview";
}

async function start() {
  index = await inflate("index");
  readLabels();
  const query = document.getElementById("query");
  query.disabled = false;
  document.getElementById("search").addEventListener("submit", (event) => {
    event.preventDefault();
    // Half of a character, of a careless paste, cannot be part of an address.
    const wanted = query.value.trim().replace(/\p{Cs}/gu, "\ufffd");
    if (wanted) location.hash = "found/" + encodeURIComponent(wanted);
  });
  window.addEventListener("hashchange", route);
  await route();
}

start().catch((error) => {
  const old = typeof DecompressionStream === "undefined";
  document.querySelector("main").prepend(el("p.bad", { role: "alert" }, old ? "Groups need a browser of 2023 or later (DecompressionStream)." : `The report cannot be read: ${error.message}`));
});
