// Single keys. They can be switched off, and do nothing while a text is typed.

let singleKeys = true;
document.addEventListener("change", function (event) {
  if (!event.target.matches(".keys-on")) return;
  singleKeys = event.target.checked;
  document.querySelectorAll(".keys-on").forEach(other => { other.checked = singleKeys; });
});
enhancers.push(part => part.querySelectorAll(".keys-on").forEach(box => { box.checked = singleKeys; }));

function isShown(card) {
  return card.checkVisibility ? card.checkVisibility() : card.offsetParent !== null;
}

function currentCard() {
  return viewer.open ? viewed : document.activeElement.closest(".card");
}

// From the card with the focus; without one, from the top of the window.
function step(by) {
  if (viewer.open) return turn(by);
  const shown = Array.from(document.querySelectorAll(".card")).filter(isShown), here = currentCard();
  const above = shown.filter(card => card.getBoundingClientRect().top < 0).length;
  const next = here ? shown[shown.indexOf(here) + by] : shown[by > 0 ? above : above - 1];
  if (!next) return;
  next.querySelector(".enlarge").focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function toggleSlider() {
  if (viewer.open) actions.slide();
  else slideAll(!document.querySelector("main").classList.contains("sliding"));
}

const keys = {
  j: () => step(1),
  k: () => step(-1),
  s: toggleSlider,
  d: () => showChanges(!document.documentElement.classList.contains("changes")),
  p: toggleVideos,
  f: () => showStrips(!document.documentElement.classList.contains("strips")),
  l: () => currentCard() && copyLink(currentCard()),
  c: () => currentCard() && copyImage(currentCard()),
  "/": () => viewer.open || document.querySelector(".filter input")?.focus(),
};

document.addEventListener("keydown", function (event) {
  const typing = event.target.matches("input:not([type=range], [type=checkbox]), select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !singleKeys || !document.querySelector(".keys-on")) return;
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});
