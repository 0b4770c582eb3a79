"use strict";
// The page is complete without this: it sorts and filters long tables.
function valueOf(row, column) {
  const text = row.cells[column].firstChild ? row.cells[column].firstChild.textContent : "";
  const number = parseFloat(text.replace(/,/g, "").replace("−", "-"));
  return Number.isNaN(number) ? text : number;
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b);
}
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    if (!head.textContent || head.classList.contains("axis")) return;
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const isUp = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      const rows = Array.from(body.rows);
      rows.sort((a, b) => compare(valueOf(a, column), valueOf(b, column)) * (isUp ? 1 : -1));
      body.append(...rows);
    });
  });
  if (body.rows.length < 12) continue;
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter";
  field.setAttribute("aria-label", "Filter the rows");
  table.before(field);
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
}
