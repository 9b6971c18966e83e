// Sorting and filtering of the claims; without scripts the table is read as it stands.
"use strict";
const table = document.getElementById("ledger");
const form = document.getElementById("filter");
const rows = [...table.tBodies[0].rows];

function show() {
  const chosen = ["verdict", "kind", "paper"].map((name) => [name, form.elements[name].value]);
  const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = chosen.some(([name, value]) => value && row.dataset[name] !== value)
      || !words.every((word) => text.includes(word));
  }
  form.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
}

function keyOf(row, column) {
  const cell = row.cells[column];
  if (!("value" in cell.dataset)) return cell.textContent.trim().toLowerCase();
  return cell.dataset.value === "" ? Infinity : Number(cell.dataset.value);
}

function sort(head) {
  const column = head.cellIndex, sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  rows.sort((a, b) => {
    const first = keyOf(a, column), second = keyOf(b, column);
    return sign * (first < second ? -1 : first > second ? 1 : 0);
  });
  table.tBodies[0].append(...rows);
}

for (const head of table.tHead.rows[0].cells) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = head.textContent;
  button.addEventListener("click", () => sort(head));
  head.replaceChildren(button);
}
form.addEventListener("input", show);
form.addEventListener("submit", (event) => event.preventDefault());
form.hidden = false;
show();
