// The comparison of several runs: one metric at a time, and links at the top that lead to its parts.
function makeChoosable(select) {
  const parts = Array.from(document.querySelectorAll("[data-metric]"));
  const links = Array.from(document.querySelectorAll("header nav a[href^='#m0-']"));
  const names = links.map(link => link.hash.replace("#m0-", ""));

  function show() {
    parts.forEach(function (part) { part.hidden = part.dataset.metric !== select.value; });
    const number = parts.findIndex(part => !part.hidden);
    links.forEach(function (link, k) { link.hash = "#m" + number + "-" + names[k]; });
  }
  select.addEventListener("change", show);
  show();
}

enhancers.push(part => part.querySelectorAll("#compare-metric").forEach(makeChoosable));
