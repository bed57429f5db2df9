// The change of an edit: over both results lies the source, and what differs from it shines (style/changes.css).

function layOver(card) {
  const source = card.querySelector(":scope > .given img"), two = card.querySelector(":scope > .two");
  if (!source || two.querySelector(".over, .reel")) return;
  two.querySelectorAll(":scope > div").forEach(function (side) {
    if (!side.querySelector("img")) return;
    const over = source.cloneNode();
    over.removeAttribute("id");
    over.alt = "";
    over.classList.add("over");
    side.append(over);
  });
}

function showChanges(on) {
  if (on) document.querySelectorAll(".card").forEach(layOver);
  document.documentElement.classList.toggle("changes", on);
  document.querySelectorAll("[data-do=changes]").forEach(b => b.setAttribute("aria-pressed", on));
  if (viewer.open) fillViewer(viewed);
}

enhancers.push(function (part) {
  const on = document.documentElement.classList.contains("changes");
  if (on) part.querySelectorAll(".card").forEach(layOver);
  part.querySelectorAll("[data-do=changes]").forEach(function (b) {
    b.setAttribute("aria-pressed", on);
    b.addEventListener("click", () => showChanges(b.getAttribute("aria-pressed") !== "true"));
  });
});
