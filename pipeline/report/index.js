// Without it the table stands as it is, newest first.
const body = document.querySelector("tbody");
for (const heading of document.querySelectorAll("th[scope=col]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = heading.textContent;
  heading.replaceChildren(button);
  button.addEventListener("click", () => {
    const place = heading.cellIndex;
    const falling = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = (row) => row.cells[place].dataset.key ?? row.cells[place].textContent;
    const missing = (value) => value === "" || value === "–";
    const order = (a, b) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      const apart = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
      return falling ? -apart : apart;
    };
    body.replaceChildren(...[...body.rows].sort((a, b) => order(key(a), key(b))));
  });
}

// The filter: words that a row contains, and conditions such as train.lr<0.01 on its settings and metrics.
const filter = document.querySelector(".filter");
if (filter) {
  const input = filter.querySelector("input");
  const status = filter.querySelector("output");
  const tests = {
    "=": (a, b) => a === b, "!=": (a, b) => a !== b,
    "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
  };
  const plain = (text) => (text !== "" && !isNaN(text) ? Number(text) : text.toLowerCase());
  const matches = (row, facts, term) => {
    const parts = term.match(/^([^<>=!]+)(<=|>=|!=|=|<|>)(.*)$/);
    if (!parts) return row.textContent.toLowerCase().includes(term.toLowerCase());
    const value = facts[parts[1]];
    if (value === undefined || value === null) return false;
    const [a, b] = [plain(String(value)), plain(parts[3])];
    return typeof a === typeof b ? tests[parts[2]](a, b) : parts[2] === "!=";
  };
  const apply = () => {
    const terms = input.value.split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const facts = JSON.parse(row.dataset.facts);
      row.hidden = !terms.every((term) => matches(row, facts, term));
      shown += !row.hidden;
    }
    status.textContent = terms.length ? `${shown} of ${body.rows.length} runs` : "";
  };
  filter.hidden = false;
  input.addEventListener("input", apply);
  apply();
}
