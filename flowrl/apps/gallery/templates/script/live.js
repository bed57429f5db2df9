// The live page: asks for the state of the run folders, and replaces the parts of the page that have changed. Addresses
// are relative, so that any port and any tunnel do.

const bar = document.querySelector("aside.live"), pauseButton = bar.querySelector("[data-do=pause]");
const every = 1000 * bar.dataset.every;
const SLOWEST = 30000;  // ms between two questions to a server that does not answer
const SHARE = 20;  // the pages of the server cost at most one of this many seconds
let version = bar.dataset.version, paused = false, failures = 0, timer = null, nextPart = 0, known = null;
const waiting = new Map();  // parts of cards, while a pair is enlarged

// ---- what is kept of a part: by the nearest element with an id, and the place inside it

function keyOf(element, selector) {
  const owner = element.closest("[id]");
  const own = Array.from(owner.querySelectorAll(selector)).filter(other => other.closest("[id]") === owner);
  return owner.id + "/" + own.indexOf(element);
}

const CONTROLS = "input:not(.scrub), select", FOLDS = "details", BOXES = ".scroll, pre, .cards", STOPS = "a[href], button, input, select, summary, svg.chart, [tabindex]";

function collect(part, selector, value) {
  const found = new Map();
  part.querySelectorAll(selector).forEach(element => found.set(keyOf(element, selector), value(element)));
  return found;
}

function give(part, selector, values, set) {
  part.querySelectorAll(selector).forEach(function (element) {
    const key = keyOf(element, selector);
    if (values.has(key)) set(element, values.get(key));
  });
}

function keep(part) {
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  return {
    folds: collect(part, FOLDS, fold => fold.open),
    controls: collect(part, CONTROLS, control => control.value),
    boxes: collect(part, BOXES, box => [box.scrollLeft, box.scrollTop]),
    sorted: collect(part, "th[aria-sort]", head => [head.querySelector("button").dataset.column, head.getAttribute("aria-sort")]),
    turned: collect(part, ".prompt-box", box => box.turned()),
    read: collect(part, ".chart-box", box => box.querySelector(".readout").textContent),
    focus: focused && keyOf(focused, STOPS),
    marked: part.querySelector(".marked")?.id,
  };
}

function restore(part, kept) {
  give(part, FOLDS, kept.folds, (fold, open) => { fold.open = open; });
  give(part, CONTROLS, kept.controls, function (control, value) {
    if (control.value === value || control.type === "checkbox") return;
    if (control.tagName === "SELECT" && !Array.from(control.options).some(option => option.value === value)) return;
    control.value = value;
    control.dispatchEvent(new Event(control.tagName === "SELECT" ? "change" : "input", { bubbles: true }));
  });
  for (const [column, order] of kept.sorted.values()) {
    const sorter = part.querySelector("button[data-column='" + column + "']");
    sorter?.click();
    if (order === "descending") sorter?.click();
  }
  give(part, ".prompt-box", kept.turned, (box, first) => box.turnTo(first));
  give(part, BOXES, kept.boxes, function (box, place) { [box.scrollLeft, box.scrollTop] = place; });
  if (kept.focus) part.querySelectorAll(STOPS).forEach(function (stop) {
    if (keyOf(stop, STOPS) === kept.focus) stop.focus({ preventScroll: true });
  });
  give(part, ".chart-box", kept.read, (box, text) => { if (text) box.querySelector("svg.chart").readAgain(text); });
  if (kept.marked) document.getElementById(kept.marked)?.classList.add("marked");
}

// ---- the place in the window stays

const LANDMARKS = ".chart-box, .card, tr, section, header, footer";

// The first landmark that begins inside the window, and those that enclose it.
function landmark() {
  const all = Array.from(document.querySelectorAll("main :is(" + LANDMARKS + ")"));
  const seen = all.find(element => element.getBoundingClientRect().top >= bar.offsetHeight) || all[all.length - 1];
  const found = [];
  for (let here = seen; here; here = here.parentElement?.closest(LANDMARKS)) {
    if (here.closest("[id]")) found.push([keyOf(here, LANDMARKS), here.getBoundingClientRect().top]);
  }
  return found;
}

function returnTo(found) {
  const now = new Map(Array.from(document.querySelectorAll("main :is(" + LANDMARKS + ")"), e => [e.closest("[id]") ? keyOf(e, LANDMARKS) : "", e]));
  const place = found.find(([key]) => now.has(key));
  if (place) window.scrollBy({ top: now.get(place[0]).getBoundingClientRect().top - place[1], behavior: "instant" });
}

// ---- parts

function busy(part) {
  const chosen = document.getSelection();
  return part.querySelector(":active") !== null || (!chosen.isCollapsed && chosen.containsNode(part, true));
}

function replace(old, fresh) {
  const kept = keep(old);
  old.replaceWith(fresh);
  enhance(fresh);
  restore(fresh, kept);
}

function parsed(html) {
  const box = document.createElement("template");
  box.innerHTML = html;
  return box.content.firstElementChild;
}

// Replaces what may be replaced now; the rest waits for the next question.
function apply(parts) {
  const place = window.scrollY > 0 ? landmark() : [];
  for (const [id, html] of parts) {
    const old = document.getElementById(id);
    if (!old || busy(old) || (viewer.open && old.querySelector(".card"))) waiting.set(id, html);
    else {
      waiting.delete(id);
      replace(old, parsed(html));
    }
  }
  returnTo(place);
}

function applyWhole(html) {
  const old = document.querySelector("main"), place = window.scrollY > 0 ? landmark() : [];
  if (viewer.open || busy(old)) return false;
  const fresh = parsed(html), kept = keep(old);
  fresh.className = old.className;
  waiting.clear();
  old.replaceWith(fresh);
  enhance(fresh);
  restore(fresh, kept);
  returnTo(place);
  return true;
}

async function refresh() {
  const answer = await ask("parts?have=" + encodeURIComponent(version));
  nextPart = Date.now() + 1000 * SHARE * answer.took_s;
  if (answer.main !== undefined) {
    if (!applyWhole(answer.main)) return;
  } else apply(Object.entries(answer.parts));
  version = answer.version;
  document.title = answer.title;
}

// ---- the state

async function ask(address) {
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(60000) });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

function ago(seconds) {
  if (seconds < 90) return Math.round(seconds) + " s ago";
  if (seconds < 5400) return Math.round(seconds / 60) + " min ago";
  return seconds < 129600 ? Math.round(seconds / 3600) + " h ago" : Math.round(seconds / 86400) + " days ago";
}

function line(run, named) {
  const words = (named ? run.name + ": " : "") + run.text;
  const made = document.createElement("li");
  made.append(words);
  if (run.command) {
    const code = document.createElement("code");
    code.textContent = run.command;
    made.append(" Go on with: ", code);
  }
  return made;
}

function say(state, text) {
  const changed = bar.querySelector(".state").textContent !== text;
  bar.dataset.state = state;
  if (!changed) return;
  bar.querySelector(".state").textContent = text;
  const word = state + text.replace(/\d+/g, "");  // a new iteration is no news for a screen reader
  if (say.heard !== word) bar.querySelector(".heard").textContent = text;
  say.heard = word;
}

function showState(answer) {
  known = { answer, at: Date.now() };
  const one = answer.runs.length === 1, each = bar.querySelector(".each"), trouble = bar.querySelector(".trouble");
  say(answer.state, one ? answer.runs[0].text : answer.text);
  const lines = answer.runs.filter(run => !one || run.command).map(run => line(one ? { text: "", command: run.command } : run, !one));
  if (each.textContent !== lines.map(made => made.textContent).join("")) each.replaceChildren(...lines);
  each.hidden = !lines.length;
  trouble.textContent = answer.problem;
  trouble.hidden = !answer.problem;
  showAge();
}

function showAge() {
  const age = bar.querySelector(".age");
  if (!known) return;
  const rows = known.answer.runs.filter(run => run.age_s !== null), last = rows.sort((a, b) => a.age_s - b.age_s)[0];
  if (!last) age.textContent = "";
  else age.textContent = "Last row " + ago(last.age_s + (Date.now() - known.at) / 1000) + ", " + last.at + (paused ? ". Paused." : "");
}

async function look() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  let pause = every;
  try {
    const answer = await ask("state");
    failures = 0;
    showState(answer);
    if (waiting.size) apply(Array.from(waiting));
    if (answer.version !== version && Date.now() >= nextPart) await refresh();
    if (answer.over) pause = 5 * every;
  } catch (error) {
    failures += 1;
    pause = Math.min(every * 2 ** failures, SLOWEST);
    say("lost", "No answer from flowrl watch. The page shows what it had; it asks again.");
  }
  timer = setTimeout(look, pause);
}

pauseButton.addEventListener("click", function () {
  paused = !paused;
  pauseButton.setAttribute("aria-pressed", paused);
  showAge();
  look();
});
document.addEventListener("visibilitychange", look);
viewer.addEventListener("close", () => apply(Array.from(waiting)));
setInterval(showAge, 1000);
look();
