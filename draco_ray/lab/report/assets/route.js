// ---- where we are

let standing = "";
const VIEWS = ["groups", "group", "rollout", "task", "beside", "found", "labels"];
const NO_GROUP = "No such group in this report.";

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function route() {
  const mine = ++ticket;
  const [view, key, task, ...rest] = location.hash.slice(1).split("/").map(decoded);
  const name = VIEWS.includes(view) ? view : "overview";
  const place = name === "group" || name === "rollout" ? findGroup(key, task) : -1;
  const part = name === "rollout" ? rest[1] : rest[0];
  const shown = name === "rollout" ? [name, key, task, rest[0]].join("/") : name === "overview" ? name : location.hash.replace(/\/(call|p)\d+$/, "");
  if (standing !== shown) {
    const box = document.getElementById(name);
    const made = {
      groups: groupsView,
      labels: labelsView,
      group: () => (place < 0 ? [el("p", {}, NO_GROUP)] : groupView(place)),
      rollout: () => (place < 0 ? [el("p", {}, NO_GROUP)] : rolloutView(place, Number(rest[0]), rest[1])),
      task: () => taskView(key || ""),
      beside: () => besideView([[key, task, rest[0]], rest.slice(1, 4)]),
    }[name];
    if (name === "found") foundView(key || "", task || "", rest[0] || "", mine);
    else if (made) {
      const content = await made();
      if (mine !== ticket) return;
      box.replaceChildren(...content.filter(Boolean));
    }
    for (const section of document.querySelectorAll(".view")) section.hidden = section.id !== name;
    for (const link of document.querySelectorAll("header nav a")) {
      const here = link.dataset.view === (["overview", "labels"].includes(name) ? name : "groups");
      link.classList.toggle("here", here);
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    standing = shown;
    window.scrollTo(0, 0);
  }
  if (name === "rollout" && place >= 0) choose(/^c\d+$/.test(part || "") ? Number(part.slice(1)) - 1 : -1, index.groups[place], await open(place), Number(rest[0]), true);
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
    // Half of a surrogate pair, e.g. pasted, cannot be part of an address.
    const wanted = query.value.trim().replace(/\p{Cs}/gu, "\ufffd");
    if (wanted) location.hash = foundLink(wanted, "", "");
  });
  const timeline = document.getElementById("timeline-step");
  if (timeline) timeline.addEventListener("change", () => showTimeline(timeline.value));
  window.addEventListener("hashchange", route);
  // Before the first step there are only evaluated rollouts.
  if (!index.groups.some((group) => !group.split)) filters.of = "evaluated";
  await route();
}

start().catch((error) => {
  const old = typeof DecompressionStream === "undefined";
  document.querySelector("main").prepend(el("p.bad", { role: "alert" }, old ? "Groups need a browser of 2023 or later (DecompressionStream)." : `The report cannot be read: ${error.message}`));
});
