// Shows pairs and sends the answers: left, right, tie, skip, undo, by keys or buttons.
"use strict";

const token = document.querySelector('meta[name="vote-token"]').content;
const at = (id) => document.getElementById(id);
const keys = { ArrowLeft: "left", 1: "left", ArrowRight: "right", 2: "right", ArrowDown: "tie", s: "skip", S: "skip", u: "undo", U: "undo" };
// A second person at the same server keeps their name in their own tab.
let voter = sessionStorage.getItem("voter") || at("voter").value;
let pair = null;
let undoable = false;
// A run under way asks again by itself.
let waits = false;
const lookEvery = 2000;
// One question at a time: a key that is held down must not answer the next pair unseen.
let busy = true;
// A name was entered meanwhile.
let named = false;

function say(problem) {
  at("problem").textContent = problem;
  at("problem").hidden = !problem;
}

function enable() {
  document.body.dataset.state = busy ? "busy" : pair ? "pair" : "idle";
  for (const button of document.querySelectorAll("[data-choice], [data-enlarge]")) button.disabled = !pair;
  at("undo").disabled = !undoable;
}

function loaded(id, address) {
  const image = at(id);
  return new Promise((resolve, reject) => {
    image.onload = resolve;
    image.onerror = () => reject(new Error("An image did not load. Load the page again."));
    image.src = address;
  }).then(() => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < 128));
}

async function show(state) {
  voter = state.voter;
  undoable = state.undoable;
  sessionStorage.setItem("voter", voter);
  // A name that was entered while this was asked for is still to be read.
  if (document.activeElement !== at("voter") && !named) at("voter").value = voter;
  at("progress").textContent = state.progress;
  waits = state.waits;
  const next = state.pair;
  pair = null;
  at("done").hidden = waits || next !== null;
  at("waits").hidden = !waits || next !== null;
  at("pair").hidden = next === null;
  if (next === null) return;
  at("prompt").textContent = next.prompt || "(no prompt)";
  at("question").textContent = document.title = `Which ${next.noun} is better?`;
  at("left").alt = `Left ${next.noun}`;
  at("right").alt = `Right ${next.noun}`;
  showSources(next.sources);
  await Promise.all([loaded("left", next.left), loaded("right", next.right)]);
  pair = next;
}

// What the prompt edits stands above both; a click shows it large.
function showSources(addresses) {
  at("sources").hidden = !addresses.length;
  at("sources").replaceChildren(...addresses.map((address, number) => {
    const figure = document.createElement("figure"), button = document.createElement("button"), image = document.createElement("img");
    const name = document.createElement("figcaption");
    button.type = "button";
    button.setAttribute("aria-label", "Enlarge the source");
    image.id = `source-${number}`;
    image.alt = name.textContent = addresses.length > 1 ? `Source ${number + 1}` : "Source";
    button.addEventListener("click", () => enlarge(image.id));
    button.append(image);
    figure.append(button, name);
    image.onload = () => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < 128);
    image.src = address;
    return figure;
  }));
}

// One image as large as the window; the other one then takes its place, so that differences are seen.
function enlarge(side) {
  const { src, className, alt } = at(side);
  Object.assign(at("large-image"), { src, className, alt });
  at("large-name").textContent = alt;
  at("large").dataset.side = side;
  if (!at("large").open) at("large").showModal();
}

async function post(question, said) {
  const headers = { "Content-Type": "application/json", "X-Vote-Token": token };
  const answer = await fetch(question, { method: "POST", headers, body: JSON.stringify(said) });
  const text = await answer.text();
  if (answer.ok) return JSON.parse(text);
  throw new Error(answer.headers.get("Content-Type") === "application/json" ? JSON.parse(text).problem : text);
}

async function send(question, said = {}) {
  busy = true;
  enable();
  try {
    await show(await post(question, { voter, ...said }));
    say("");
  } catch (error) {
    // A refused answer leaves a pair on the screen that may no longer be the open one.
    if (question !== "ask") await post("ask", { voter }).then(show).catch(() => { pair = null; });
    say(error instanceof TypeError ? "No answer from flowrl vote: is it still running? The last answer may not have counted; load the page again." : error.message);
  }
  busy = false;
  if (named) rename();
  else enable();
}

function rename() {
  const before = voter;
  named = false;
  voter = at("voter").value;
  at("voter").blur();
  send("ask").then(() => { if (!at("problem").hidden) voter = before; });
}

function choose(choice) {
  if (busy) return;
  if (choice === "undo") {
    if (undoable) send("undo");
  } else if (pair) send("vote", { pair: pair.token, choice });
}

document.addEventListener("keydown", (event) => {
  const choice = keys[event.key];
  if (!choice || event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.id === "voter") return;
  // No vote on what is hidden: keys of a side show it.
  if (at("large").open) return choice === "left" || choice === "right" ? enlarge(choice) : undefined;
  const prompt = at("prompt");
  // A long prompt that has the focus is scrolled by the key.
  if (choice === "tie" && event.target === prompt && prompt.scrollHeight > prompt.clientHeight) return;
  event.preventDefault();
  choose(choice);
});
for (const button of document.querySelectorAll("[data-choice]")) button.addEventListener("click", () => choose(button.dataset.choice));
for (const button of document.querySelectorAll("[data-enlarge]")) button.addEventListener("click", () => enlarge(button.dataset.enlarge));
for (const id of ["large-image", "other"]) at(id).addEventListener("click", () => enlarge(at("large").dataset.side === "left" ? "right" : "left"));
at("undo").addEventListener("click", () => choose("undo"));
at("who").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy) named = true;
  else rename();
});
at("voter").value = voter;
send("ask");
setInterval(() => { if (waits && !pair && !busy && !document.hidden) send("ask"); }, lookEvery);
document.addEventListener("visibilitychange", () => { if (waits && !pair && !busy && !document.hidden) send("ask"); });
