// Every prompt: one filter for its images, which come in pages, and for the table of scores with its means.

// Numbers are written with a true minus sign; a dash means "not scored".
function numberIn(cell) {
  const value = parseFloat(cell.textContent.replace("\u2212", "-"));
  return Number.isNaN(value) ? null : value;
}

// Smaller gains first, or larger ones for a sign of -1; a pair without a score comes last.
function byGain(a, b, sign) {
  const gains = [a, b].map(card => parseFloat(card.dataset.gain)), bare = gains.map(Number.isNaN);
  return bare[0] || bare[1] ? bare[0] - bare[1] : sign * (gains[0] - gains[1]);
}

const PAGE_SIZE = 24;

// The cards of `list` that contain `needle`, a page at a time. Returns functions that filter, and that turn to a card.
function pagedList(box, list) {
  const all = Array.from(list.children), pager = box.querySelector(".pager"), order = box.querySelector("select");
  const orders = {
    given: () => 0,
    worst: (a, b) => byGain(a, b, 1),
    best: (a, b) => byGain(a, b, -1),
    text: (a, b) => promptOf(a).localeCompare(promptOf(b)),
  };
  let shown = all, first = 0;

  function draw() {
    const now = new Set(shown.slice(first, first + PAGE_SIZE));
    all.forEach(card => { card.hidden = !now.has(card); });
    pager.hidden = shown.length <= PAGE_SIZE;
    pager.querySelector(".page-of").textContent = (first + 1) + " to " + (first + now.size) + " of " + shown.length;
    pager.querySelector("[data-turn='-1']").disabled = first === 0;
    pager.querySelector("[data-turn='1']").disabled = first + PAGE_SIZE >= shown.length;
  }
  function filter(needle) {
    all.forEach(card => card.classList.toggle("out", !promptOf(card).toLowerCase().includes(needle)));
    shown = Array.from(list.children).filter(card => !card.classList.contains("out"));
    first = 0;
    draw();
  }
  order.addEventListener("change", function () {
    list.append(...all.slice().sort(orders[order.value]));
    filter(box.querySelector("input").value.trim().toLowerCase());
  });
  pager.addEventListener("click", function (event) {
    const by = event.target.dataset.turn;
    if (!by) return;
    first += by * PAGE_SIZE;
    draw();
    if (event.target.disabled) pager.querySelector("button:not(:disabled)").focus();
    list.scrollIntoView({ block: "start" });
  });
  function show(card) {
    first = PAGE_SIZE * Math.floor(shown.indexOf(card) / PAGE_SIZE);
    draw();
  }
  function turnTo(place) {
    first = place < shown.length ? place : 0;
    draw();
  }
  return { filter, show, turnTo, first: () => first };
}

function makeSearchable(box) {
  const body = box.querySelector(".prompts tbody"), rows = Array.from(body.rows);
  const every = box.querySelector(".every"), paged = every && pagedList(box, every);
  const search = box.querySelector("input"), count = box.querySelector(".count");
  const means = Array.from(box.querySelectorAll(".means td[data-decimals]"));

  function refresh() {
    const needle = search.value.trim().toLowerCase();
    const shown = rows.filter(function (row) {
      row.hidden = !row.cells[1].textContent.toLowerCase().includes(needle);
      return !row.hidden;
    });
    if (paged) paged.filter(needle);
    count.textContent = shown.length + " of " + rows.length + " prompts";
    for (const cell of means) {
      const values = shown.map(row => numberIn(row.cells[cell.cellIndex + 1])).filter(v => v !== null);
      const mean = values.reduce((a, b) => a + b, 0) / values.length;
      const sign = cell.dataset.signed && mean > 0 ? "+" : "";
      cell.textContent = values.length ? sign + mean.toFixed(+cell.dataset.decimals).replace("-", "\u2212") : "\u2013";
    }
  }

  box.querySelectorAll("button[data-column]").forEach(function (button) {
    button.addEventListener("click", function () {
      const head = button.closest("th"), column = +button.dataset.column;
      const up = head.getAttribute("aria-sort") !== "ascending";
      box.querySelectorAll("th[aria-sort]").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = rows.map(function (row) {
        const cell = row.cells[column];
        return [column === 1 ? cell.textContent.trim() : numberIn(cell), row];
      });
      keyed.sort(function (a, b) {
        if (a[0] === null || b[0] === null) return (a[0] === null) - (b[0] === null);
        const order = column === 1 ? a[0].localeCompare(b[0]) : a[0] - b[0];
        return up ? order : -order;
      });
      body.append(...keyed.map(pair => pair[1]));
    });
  });
  // Turns to a card or a row, past a filter that hides it.
  box.show = function (element) {
    if (element.closest(".out, tr[hidden]")) {
      search.value = "";
      refresh();
    }
    const card = paged && Array.from(every.children).find(other => other.contains(element));
    if (card) paged.show(card);
  };
  // Where the list of images is turned to, and how it is turned there.
  box.turned = () => paged ? paged.first() : 0;
  box.turnTo = first => paged && paged.turnTo(first);
  search.addEventListener("input", refresh);
  refresh();
}

enhancers.push(part => part.querySelectorAll(".prompt-box").forEach(makeSearchable));
