// The values of a chart at the pointer, or at the arrow keys.

// The number that a reading begins with: "iteration 40: ..." or, with a gap between thousands, "20 000: ...".
function placeIn(text) {
  return parseFloat(text.split(":")[0].replace("iteration", "").replace(/ /g, ""));
}

function makeReadable(chart) {
  const points = JSON.parse(chart.dataset.readout);
  const cursor = chart.querySelector(".cursor"), text = chart.closest(".chart-box").querySelector(".readout");
  let place = points.length - 1;

  function read(index) {
    place = Math.min(Math.max(index, 0), points.length - 1);
    cursor.setAttribute("x1", points[place][0]);
    cursor.setAttribute("x2", points[place][0]);
    text.textContent = points[place][1];
    chart.classList.add("read");
  }
  function leave() {
    chart.classList.remove("read");
    text.textContent = "";
  }
  chart.tabIndex = 0;
  chart.addEventListener("pointermove", function (event) {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const distances = points.map(point => Math.abs(point[0] - x));
    read(distances.indexOf(Math.min(...distances)));
  });
  chart.addEventListener("keydown", function (event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    read(chart.classList.contains("read") ? place + by : place);
  });
  chart.addEventListener("pointerleave", leave);
  chart.addEventListener("blur", leave);
  // Reads at the point that is the nearest to a text's: the same iteration, also on an axis that has grown.
  chart.readAgain = function (text) {
    const distances = points.map(point => Math.abs(placeIn(point[1]) - placeIn(text)));
    read(distances.indexOf(Math.min(...distances)));
  };
}

enhancers.push(part => part.querySelectorAll("svg.chart").forEach(makeReadable));
