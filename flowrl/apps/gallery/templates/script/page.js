// The page's script is the files of this folder in one strict program; the page works without it too.
"use strict";
document.documentElement.classList.add("js");

// A sentence about what happened, for eyes and screen readers; the open dialog hides the rest of the page from both.
function tell(text) {
  const line = document.querySelector(".told");
  (document.querySelector("dialog[open]") || document.body).append(line);
  line.textContent = text;
  clearTimeout(tell.timer);
  tell.timer = setTimeout(function () { line.textContent = ""; }, 4000);
}

function button(text, label, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

// Images outside the window wait until they are needed; on paper they are.
window.addEventListener("beforeprint", function () {
  document.querySelectorAll("img[loading]").forEach(image => { image.loading = "eager"; });
});

// What makes the elements of a part of the page work. A live page replaces parts, so each file adds its function here.
const enhancers = [];

function enhance(part) {
  enhancers.forEach(work => work(part));
}

// What scrolls can be reached with the keyboard.
enhancers.push(part => part.querySelectorAll(".scroll:not([tabindex])").forEach(box => { box.tabIndex = 0; }));
