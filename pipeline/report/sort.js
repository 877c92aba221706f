// Without it the table stands as it is, newest first.
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
    const body = heading.closest("table").tBodies[0];
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
