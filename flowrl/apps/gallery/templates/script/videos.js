// Videos: the frames of one lie in one image, row by row. Without a script, on paper and where no motion is wanted they are
// seen so, as a filmstrip; else one after the other. The videos of a pair, or of a row of a table, play together.

const noMotion = matchMedia("(prefers-reduced-motion: reduce)");
const players = new Set();
let playAll = !noMotion.matches, clock = null, before = 0;

// ---- one video

function videoOf(reel) {
  const image = reel.querySelector("img"), canvas = reel.querySelector("canvas") || document.createElement("canvas");
  const frames = +reel.dataset.frames, columns = +reel.dataset.columns, ms = +reel.dataset.ms;
  canvas.width = reel.dataset.width;
  canvas.height = reel.dataset.height;
  canvas.className = image.className;
  canvas.setAttribute("aria-hidden", "true");  // the image has the words
  reel.append(canvas);
  const pen = canvas.getContext("2d"), w = canvas.width, h = canvas.height;
  let shown = -1, frame = 0;

  function draw() {
    if (!image.complete || !image.naturalWidth) return;
    const across = image.naturalWidth / columns, down = image.naturalHeight / Math.ceil(frames / columns);
    pen.drawImage(image, across * (frame % columns), down * Math.floor(frame / columns), w, h, 0, 0, w, h);
    shown = frame;
  }
  image.addEventListener("load", draw);
  function seek(at) {
    frame = Math.min(Math.floor(at / ms + 1e-6), frames - 1);
    if (frame !== shown) draw();
  }
  return { frames, ms, length: frames * ms, seek };
}

// What stands for an image on a copied image: of a video the frame that is seen, or all of them.
function faceOf(image) {
  const canvas = document.documentElement.classList.contains("strips") ? null : image.closest(".reel")?.querySelector("canvas");
  if (canvas) return { source: canvas, width: canvas.width, height: canvas.height };
  return { source: image, width: image.naturalWidth, height: image.naturalHeight };
}

// ---- several that play together

const seen = new IntersectionObserver(function (entries) {
  for (const entry of entries) entry.target.player.visible = entry.isIntersecting;
  run();
});

// Gives the videos in `box` one clock, whose controls `add` puts on the page; `same`: a player whose time they take.
function playTogether(box, name, add, same) {
  const videos = Array.from(box.querySelectorAll(".reel"), videoOf);
  if (!videos.length) return;
  const longest = videos.reduce((a, b) => (b.length > a.length ? b : a));
  const player = { visible: false, playing: same ? same.playing : playAll, at: same ? same.at : 0, box };
  const controls = document.createElement("div"), scrub = document.createElement("input");
  const play = button("", "", () => set(!player.playing));
  controls.className = "player";
  play.className = "play";
  Object.assign(scrub, { type: "range", className: "scrub", min: 0, max: longest.frames - 1, step: 1, value: 0 });
  scrub.setAttribute("aria-label", "Frame: " + name);
  controls.append(play, scrub);
  add(controls);

  function seek(at) {
    player.at = at % longest.length;
    for (const video of videos) video.seek(player.at);
    const frame = Math.min(Math.floor(player.at / longest.ms + 1e-6), longest.frames - 1);
    if (+scrub.value !== frame) scrub.value = frame;
    scrub.setAttribute("aria-valuetext", "frame " + (frame + 1) + " of " + longest.frames + ", " + (frame * longest.ms / 1000).toFixed(2) + " s");
  }
  function set(on) {
    player.playing = on;
    play.classList.toggle("on", on);
    play.setAttribute("aria-label", (on ? "Pause: " : "Play: ") + name);
    run();
  }
  scrub.addEventListener("input", function () {
    set(false);
    seek(scrub.value * longest.ms);
  });
  Object.assign(player, { seek, set });
  box.player = player;
  players.add(player);
  seen.observe(box);
  seek(player.at);
  set(player.playing);
}

function playCard(card) {
  const name = promptOf(card) + ", " + card.querySelector(".id").textContent;
  playTogether(card.querySelector(".two"), name, controls => card.querySelector("figcaption").prepend(controls));
}

function playRow(row) {
  const head = row.cells[0];
  playTogether(row, head.querySelector(".clamp").textContent, controls => head.append(controls));
}

// Of videos that are taken off the page, or replaced.
function forgetVideos(part) {
  for (const player of players) {
    if (player.box.isConnected && !part?.contains(player.box)) continue;
    seen.unobserve(player.box);
    players.delete(player);
  }
}

// ---- the clock, which stands while nothing plays in sight

function run() {
  if (clock !== null) return;
  before = performance.now();
  clock = requestAnimationFrame(tick);
}

function tick(now) {
  const playing = Array.from(players).filter(player => player.playing && player.visible);
  for (const player of playing) player.seek(player.at + Math.max(now - before, 0));
  before = now;
  clock = playing.length && !document.documentElement.classList.contains("strips") ? requestAnimationFrame(tick) : null;
}

// ---- all of them

function toggleVideos() {
  const own = Array.from(players).find(player => viewer.contains(player.box));
  if (viewer.open) own?.set(!own.playing);
  else setAll(!playAll);
}

function setAll(on) {
  playAll = on;
  for (const player of players) player.set(on);
  tellButtons();
}

function showStrips(on) {
  document.documentElement.classList.toggle("strips", on);
  tellButtons();
  run();
}

function tellButtons() {
  const strips = document.documentElement.classList.contains("strips");
  document.querySelectorAll("[data-do=play-all]").forEach(function (b) {
    b.textContent = playAll ? "Pause every video" : "Play every video";
    b.disabled = strips;
  });
  document.querySelectorAll("[data-do=strips]").forEach(b => b.setAttribute("aria-pressed", strips));
}

noMotion.addEventListener("change", function () {
  setAll(!noMotion.matches);
  showStrips(noMotion.matches);
});

enhancers.push(function (part) {
  forgetVideos();
  part.querySelectorAll(".card").forEach(playCard);
  part.querySelectorAll("table.film tbody tr").forEach(playRow);
  part.querySelectorAll("[data-do=play-all]").forEach(b => b.addEventListener("click", () => setAll(!playAll)));
  part.querySelectorAll("[data-do=strips]").forEach(b => b.addEventListener("click", () => showStrips(b.getAttribute("aria-pressed") !== "true")));
  if (part === document) document.documentElement.classList.toggle("strips", noMotion.matches);
  tellButtons();
});
