// ---- keyboard: j and k move through a list, left and right to the group or rollout beside, / to the search

const ITEMS = ".view:not([hidden]) :is(.list tbody a.item, .hits a.item, #task a.item, .turn a.anchor, #matrix tbody a.verdict, #both tbody a.verdict)";

function moved(by) {
  const items = [...document.querySelectorAll(ITEMS)].filter((node) => node.offsetParent !== null);
  if (!items.length) return;
  const at = items.indexOf(document.activeElement);
  const to = items[at < 0 ? (by > 0 ? 0 : items.length - 1) : Math.min(Math.max(at + by, 0), items.length - 1)];
  to.focus({ preventScroll: true });
  (to.closest("article, tr, li") || to).scrollIntoView({ block: "nearest" });
}

function beside(rel) {
  const links = [...document.querySelectorAll(`.view:not([hidden]) a[rel=${rel}]`)];
  // In a rollout's view, go to rollouts of its group, not to neighbouring groups.
  const link = links.find((node) => node.classList.contains("chip")) || (document.querySelector(".view:not([hidden]) .chip.here") ? null : links[0]);
  if (link) location.hash = link.getAttribute("href").slice(1);
}

const KEYS = {
  j: () => moved(1),
  k: () => moved(-1),
  ArrowRight: () => beside("next"),
  ArrowLeft: () => beside("prev"),
  "/": () => document.getElementById("query").focus(),
  "?": () => { const help = document.getElementById("keys"); help.hidden = !help.hidden; },
  Escape: () => { document.getElementById("keys").hidden = true; },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.target instanceof Element)) return;
  const typing = event.target.matches("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  // In a text that scrolls sideways, the arrow keys scroll.
  if (event.key.startsWith("Arrow") && event.target.matches("pre, .scroll")) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

// ---- when it ran: any step's timeline

async function showTimeline(step) {
  const drawn = new DOMParser().parseFromString(await inflate("w" + step), "text/html").querySelector("svg");
  document.getElementById("timeline").replaceChildren(drawn);
}

