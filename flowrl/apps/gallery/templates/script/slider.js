// The slider: base left of the line, tuned right of it. A range input lies over both images, so that pointer, touch
// and keyboard work as in every form.

function addSlider(two, label) {
  if (two.querySelector(".slider") || two.querySelectorAll("img:not(.over)").length < 2) return;
  const slider = document.createElement("input");
  Object.assign(slider, { type: "range", min: 0, max: 100, step: 1, value: 50, className: "slider" });
  slider.setAttribute("aria-label", label);
  function move() {
    two.style.setProperty("--at", slider.value + "%");
    slider.setAttribute("aria-valuetext", slider.value + " % base");
  }
  slider.addEventListener("input", move);
  two.append(slider);
  two.classList.add("can-slide");
  move();
}

function slideIn(part) {
  part.querySelectorAll(".card").forEach(card => addSlider(card.querySelector(".two"), "Line between base and tuned: " + promptOf(card)));
}

function slideAll(on) {
  if (on) slideIn(document);
  document.querySelector("main").classList.toggle("sliding", on);
  document.querySelectorAll("[data-do=slide-all]").forEach(b => b.setAttribute("aria-pressed", on));
}

enhancers.push(function (part) {
  const on = document.querySelector("main").classList.contains("sliding");
  if (on) slideIn(part);
  part.querySelectorAll("[data-do=slide-all]").forEach(function (b) {
    b.setAttribute("aria-pressed", on);
    b.addEventListener("click", () => slideAll(b.getAttribute("aria-pressed") !== "true"));
  });
});
