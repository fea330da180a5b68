// ---- tables of judged traces: sorted by clicking a column head, filtered by text

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => { const cell = row.cells[column]; return cell.dataset.value === undefined ? cell.textContent.toLocaleLowerCase() : Number(cell.dataset.value); };
  heads.forEach((head, column) => {
    const button = el("button.sort", { type: "button", onclick: () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const rows = [...body.rows].sort((a, b) => { const one = value(a, column), other = value(b, column); return (one < other ? -1 : one > other ? 1 : 0) * (down ? -1 : 1); });
      body.replaceChildren(...rows);
      for (const each of heads) each.setAttribute("aria-sort", each === head ? (down ? "descending" : "ascending") : "none");
    } }, head.textContent);
    head.setAttribute("aria-sort", "none");
    head.replaceChildren(button);
  });
}

const traceFilter = document.getElementById("trace-filter");
if (traceFilter) {
  const rows = [...document.getElementById("traces").tBodies[0].rows], count = document.getElementById("trace-count");
  const fill = () => {
    const wanted = traceFilter.value.toLocaleLowerCase().trim();
    for (const row of rows) row.hidden = !row.textContent.toLocaleLowerCase().includes(wanted);
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = shown === rows.length ? plural(shown, "trace") : `${shown} of ${plural(rows.length, "trace")}`;
  };
  traceFilter.addEventListener("input", fill);
  fill();
}
