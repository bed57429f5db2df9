// Cards of base and tuned: images that stand on the page once, and what a card says.

// An image that was embedded further up comes here as a copy.
function copyImageTo(place) {
  const image = document.getElementById(place.hash.slice(1));
  const face = image.closest(".reel") || image;
  const shown = face.parentElement.tagName === "A" ? face.parentElement : face;
  const copy = shown.cloneNode(true);
  (copy.tagName === "IMG" ? copy : copy.querySelector("img")).removeAttribute("id");
  place.replaceWith(copy);
}

enhancers.push(part => part.querySelectorAll("a.again").forEach(copyImageTo));

function promptOf(card) {
  const own = card.classList.contains("seed") ? card.parentElement.closest(".card") : card;
  return own.querySelector(".prompt").textContent;
}

// Text, images and scores of a card.
function pairOf(card) {
  return {
    prompt: promptOf(card),
    id: card.querySelector(".id").textContent,
    run: card.dataset.run,
    images: Array.from(card.querySelectorAll(":scope > .two img:not(.over)")),
    labels: Array.from(card.querySelectorAll(":scope > .two small"), label => label.textContent),
    given: Array.from(card.querySelectorAll(":scope > .given img")),
    names: Array.from(card.querySelectorAll(":scope > .given > div:has(img) small"), label => label.textContent),
    scores: Array.from(card.querySelector("table").rows, row => Array.from(row.cells, cell => cell.textContent)),
  };
}

// Cards between which "next" and "previous" move: those of one section that the filter lets pass.
function neighbours(card) {
  return Array.from(card.parentElement.children).filter(other => !other.classList.contains("out"));
}

function makeEnlargeable(card) {
  const two = card.querySelector(".two");
  two.append(button("\u2922", "Enlarge: " + promptOf(card) + ", " + card.querySelector(".id").textContent, () => enlarge(card)));
  two.lastChild.className = "enlarge";
  two.addEventListener("click", function (event) {
    if (!event.target.matches("img, canvas") || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    enlarge(card);
  });
}

enhancers.push(part => part.querySelectorAll(".card").forEach(makeEnlargeable));
