// ---- a page that is served asks whether its run has moved on, and opens the newer one at the same place

const STANDING = "draco-standing";

function keepStanding() {
  try {
    sessionStorage.setItem(STANDING, JSON.stringify({ filters, sorting, y: window.scrollY }));
  } catch {
    // It then opens at its top.
  }
}

function takeStanding() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(STANDING) || "null");
    sessionStorage.removeItem(STANDING);
    if (!kept) return 0;
    Object.assign(filters, kept.filters);
    Object.assign(sorting, kept.sorting);
    return kept.y;
  } catch {
    return 0;
  }
}

async function watch() {
  const state = document.getElementById("live-state"), on = document.getElementById("live");
  // Nobody loses what they are typing.
  const busy = () => document.hidden || document.activeElement.matches("input:not([type=checkbox]), select, textarea");
  for (;;) {
    await new Promise((done) => setTimeout(done, Number(document.body.dataset.every || 4000)));
    try {
      const answer = await fetch("state", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const moved = (await answer.text()) !== document.body.dataset.live;
      state.textContent = moved ? "The run has moved on." : "";
      if (moved && on.checked && !busy()) {
        keepStanding();
        location.reload();
        return;
      }
    } catch {
      state.textContent = "No longer served.";
    }
  }
}

