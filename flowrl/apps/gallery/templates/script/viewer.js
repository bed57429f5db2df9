// One pair enlarged: both images whole, and the slider on demand.

const viewer = document.querySelector("dialog.viewer");
let viewed = null;

function fillViewer(card) {
  const pair = pairOf(card), list = neighbours(card), place = list.indexOf(card);
  viewed = card;
  viewer.querySelector(".prompt").textContent = pair.prompt;
  viewer.querySelector(".id").textContent = pair.id + " \u00b7 " + (place + 1) + " of " + list.length;
  const two = card.querySelector(".two").cloneNode(true);
  two.querySelectorAll("button, input").forEach(control => control.remove());
  two.classList.remove("can-slide");
  two.removeAttribute("style");
  // On a phone high images stand side by side, others one above the other: so both are whole and as large as they can be.
  const face = two.querySelector(".reel")?.dataset || two.querySelector("img");
  two.classList.toggle("high", Boolean(face) && face.height > 1.3 * face.width);
  two.querySelectorAll("[id]").forEach(image => image.removeAttribute("id"));
  two.querySelectorAll("img").forEach(image => { image.loading = "eager"; });
  const files = viewer.querySelector(".files");
  files.replaceChildren();
  Array.from(two.querySelectorAll("a"), function (link, i) {
    const file = document.createElement("a");
    file.href = link.href;
    file.textContent = pair.labels[i] + ", full size";
    link.replaceWith(...link.childNodes);
    files.append(file);
  });
  forgetVideos(viewer);
  const given = Array.from(card.querySelectorAll(":scope > .given"), shown => shown.cloneNode(true));
  given.forEach(shown => shown.querySelectorAll("[id]").forEach(image => image.removeAttribute("id")));
  given.forEach(shown => shown.querySelectorAll("img").forEach(image => { image.loading = "eager"; }));
  viewer.querySelector(".stage").replaceChildren(...given, two);
  addSlider(two, "Line between " + pair.labels.join(" and "));
  playTogether(two, pair.prompt, controls => two.after(controls), card.querySelector(".two").player);
  viewer.querySelector(".viewer-scores").replaceChildren(card.querySelector("table").cloneNode(true));
  viewer.querySelector("[data-do=previous]").disabled = place === 0;
  viewer.querySelector("[data-do=next]").disabled = place === list.length - 1;
}

function enlarge(card) {
  fillViewer(card);
  if (!viewer.open) viewer.showModal();
  (viewer.querySelector(".sliding .slider") || viewer.querySelector("[data-do=close]")).focus();
}

function turn(by) {
  const list = neighbours(viewed), card = list[list.indexOf(viewed) + by];
  if (!card) return;
  const kept = viewer.querySelector(".slider"), focused = kept === document.activeElement;
  fillViewer(card);
  if (focused) viewer.querySelector(".slider")?.focus();
  else if (document.activeElement.disabled || !viewer.contains(document.activeElement)) viewer.querySelector("[data-do=close]").focus();
}

function slide(on) {
  viewer.classList.toggle("sliding", on);
  viewer.querySelector("[data-do=slide]").setAttribute("aria-pressed", on);
}

const actions = {
  close: () => viewer.close(),
  previous: () => turn(-1),
  next: () => turn(1),
  slide: () => slide(!viewer.classList.contains("sliding")),
  link: () => copyLink(viewed),
  image: () => copyImage(viewed),
};

viewer.addEventListener("click", function (event) {
  const chosen = event.target.closest("[data-do]");
  if (chosen) actions[chosen.dataset.do]();
  else if (event.target === viewer) viewer.close();
});

// Back to the pair that was seen last, also if its page of the list has to be turned to.
viewer.addEventListener("close", function () {
  forgetVideos(viewer);
  document.body.append(document.querySelector(".told"));
  reveal(viewed, "nearest");
  viewed.querySelector(".enlarge").focus({ preventScroll: true });
});
