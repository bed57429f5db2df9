// A pair as a link and as a PNG, drawn from what the page holds.

function copyLink(card) {
  const address = location.href.split("#")[0] + "#" + card.dataset.link;
  const copied = navigator.clipboard ? navigator.clipboard.writeText(address) : Promise.reject();
  return copied.then(() => tell("Link copied."), function () {
    history.replaceState(null, "", "#" + card.dataset.link);
    tell("The clipboard refused; the link is in the address bar.");
  });
}

function lines(pen, text, width) {
  const found = [""];
  for (const word of text.split(/\s+/)) {
    const longer = (found[found.length - 1] + " " + word).trim();
    if (pen.measureText(longer).width <= width) {
      found[found.length - 1] = longer;
      continue;
    }
    found.push("");
    // Chinese and Japanese have no spaces: such a text is cut where the line is full.
    for (const letter of word) {
      if (pen.measureText(found[found.length - 1] + letter).width > width) found.push("");
      found[found.length - 1] += letter;
    }
  }
  return found.filter(Boolean);
}

// White paper in either colour scheme: the image goes to slides and papers.
function drawPair(card) {
  const pair = pairOf(card), margin = 24, gap = 12, font = getComputedStyle(document.body).fontFamily;
  const shown = pair.given.concat(pair.images), faces = shown.map(faceOf), side = Math.max(320, ...faces.map(face => face.width));
  const height = Math.round(Math.max(...faces.map(face => side * face.height / face.width)));
  const width = 2 * margin + shown.length * (side + gap) - gap, canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
  const bold = "600 20px " + font, plain = "15px " + font;
  pen.font = bold;
  const title = lines(pen, pair.prompt, width - 2 * margin);
  canvas.width = width;
  canvas.height = margin + 28 * title.length + 28 + height + 30 + 24 * pair.scores.length + margin;
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  let y = margin + 16;
  function write(text, x, ink, type, align) {
    pen.font = type;
    pen.fillStyle = ink;
    pen.textAlign = align || "left";
    pen.fillText(text, x, y);
  }
  for (const line of title) { write(line, margin, "#1f2023", bold); y += 28; }
  write(pair.run + " \u00b7 " + pair.id, margin, "#66676d", plain);
  y += 14;
  faces.forEach(function (face, i) {
    pen.imageSmoothingEnabled = !shown[i].classList.contains("pixelated");
    pen.drawImage(face.source, margin + i * (side + gap), y, side, side * face.height / face.width);
  });
  y += height + 20;
  pair.names.concat(pair.labels).forEach((label, i) => write(label, margin + i * (side + gap) + side / 2, "#66676d", plain, "center"));
  for (const [name, change, delta] of pair.scores) {
    y += 24;
    write(name, margin, "#66676d", plain);
    write(change, width - margin - 90, "#1f2023", plain, "right");
    write(delta, width - margin, "#1f2023", "600 15px " + font, "right");
  }
  return canvas;
}

// The card's images as decoded images: those outside the window have not been.
function ready(card) {
  const pair = pairOf(card);
  return Promise.all(pair.given.concat(pair.images).map(function (image) {
    image.loading = "eager";
    return image.decode();
  }));
}

function copyImage(card) {
  if (pairOf(card).images.length < 2) return Promise.resolve(tell("This pair has no two images."));
  const file = card.dataset.link + ".png";
  const blob = ready(card).then(() => new Promise(done => drawPair(card).toBlob(done, "image/png")));
  const written = window.ClipboardItem && navigator.clipboard
    ? navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]) : Promise.reject();
  return written.then(() => tell("Image copied."), () => blob.then(function (png) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(png);
    link.download = file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    tell("The clipboard refused; saved as " + file + ".");
  }));
}
