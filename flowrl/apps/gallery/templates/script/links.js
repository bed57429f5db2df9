// Links to a prompt: what they aim at is turned to, unfolded, shown and marked.

function reveal(element, block) {
  element.closest(".prompt-box")?.show(element);
  for (let fold = element.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  element.scrollIntoView({ block, behavior: "instant" });
}

// The element of the address; none where a link was mangled on its way.
function aimed() {
  try {
    return document.getElementById(decodeURIComponent(location.hash.slice(1)));
  } catch (error) {
    return null;
  }
}

function follow() {
  const aim = aimed();
  document.querySelectorAll(".marked").forEach(other => other.classList.remove("marked"));
  if (!aim || !aim.matches(".card, tr")) return;
  reveal(aim, "center");
  aim.classList.add("marked");
  (aim.querySelector(".enlarge") || aim.querySelector("a"))?.focus({ preventScroll: true });
}

window.addEventListener("hashchange", follow);
