"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isTouch = window.matchMedia("(pointer: coarse)").matches;
  const chooser = document.getElementById("group");
  const NARROW_PX = 640;

  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Figures name colours of the theme; only under keys that hold a colour is a text taken for such a name.
  function themed(value, key) {
    if (Array.isArray(value)) return value.map((item) => themed(item, key));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item, name)]));
    }
    const isColour = typeof value === "string" && /color$/.test(key) && value.startsWith("theme:");
    return isColour ? shade(value.slice(6)) : value;
  }

  function axis(own, isNarrow) {
    const title = { ...own.title, standoff: isNarrow ? 6 : 12 };
    const lines = { gridcolor: shade("line"), zerolinecolor: shade("line"), linecolor: shade("line") };
    return { automargin: true, fixedrange: isTouch, ...lines, ...own, title };
  }

  function layoutFor(own, isNarrow) {
    const family = getComputedStyle(document.body).fontFamily;
    const font = { family, size: isNarrow ? 11 : 13, color: shade("ink") };
    const hover = { align: "left", bgcolor: shade("surface"), bordercolor: shade("muted"), font: { ...font, size: 12 }, namelength: -1 };
    return {
      ...own,
      font,
      hoverlabel: hover,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: isNarrow ? 8 : 16, r: isNarrow ? 8 : 16, t: 16, b: 16 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { ...font, size: isNarrow ? 10 : 12 } },
      xaxis: axis(own.xaxis, isNarrow),
      yaxis: axis(own.yaxis, isNarrow),
      hovermode: "closest",
      dragmode: isTouch ? false : "zoom",
    };
  }

  // Each label takes the first place beside its sign where it covers no sign and no other label; else it goes without,
  // and the legend names it.
  function placeLabels(drawn, width) {
    const [x0, x1] = drawn.layout.xaxis.range;
    const [y0, y1] = drawn.layout.yaxis.range;
    const room = { width: width - 90, height: drawn.layout.height - 130 };
    const size = { char: 7.2, line: 16, gap: 9 };
    const points = drawn.data.filter((trace) => trace.text);
    const at = (trace) => ({ x: (trace.x[0] - x0) / (x1 - x0) * room.width, y: (y1 - trace.y[0]) / (y1 - y0) * room.height });
    const taken = points.map((trace) => {
      const { x, y } = at(trace);
      return { left: x - 7, right: x + 7, top: y - 7, bottom: y + 7, of: trace };
    });
    for (const trace of points) {
      const { x, y } = at(trace);
      const length = trace.text[0].replace(/&[a-z]+;/g, "x").length * size.char;
      const places = [["top right", 1, -1], ["top left", -1, -1], ["bottom right", 1, 1], ["bottom left", -1, 1], ["middle right", 1, 0], ["middle left", -1, 0]];
      const free = places.find(([, across, down]) => {
        const box = { left: across > 0 ? x + size.gap / 2 : x - length - size.gap / 2, top: y + down * size.gap - (down < 0 ? size.line : down ? 0 : size.line / 2) };
        box.right = box.left + length;
        box.bottom = box.top + size.line;
        const isInside = box.left >= 0 && box.right <= room.width && box.top >= 0 && box.bottom <= room.height;
        const hits = taken.some((other) => other.of !== trace && box.left < other.right && box.right > other.left && box.top < other.bottom && box.bottom > other.top);
        if (isInside && !hits) taken.push({ ...box, of: null });
        return isInside && !hits;
      });
      if (free) trace.textposition = free[0];
      else trace.mode = "markers";
    }
  }

  const config = { responsive: true, displaylogo: false, displayModeBar: isTouch ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };

  function draw(place, figure) {
    const section = place.closest("section, details");
    place.hidden = !figure;
    section.classList.toggle("empty", !figure);
    if (!figure) return;
    const isNarrow = place.clientWidth < NARROW_PX;
    const drawn = themed(figure, "");
    if (drawn.layout.meta && drawn.layout.meta.placesLabels) placeLabels(drawn, place.clientWidth);
    place.style.height = drawn.layout.height + "px";
    Plotly.react(place, drawn.data, layoutFor(drawn.layout, isNarrow), config);
  }

  const chosen = () => (chooser ? Number(chooser.value) : 0);

  function drawGroup() {
    for (const place of document.querySelectorAll("[data-chart]")) {
      draw(place, page.groups[chosen()] && page.groups[chosen()][place.dataset.chart]);
    }
    for (const part of document.querySelectorAll("[data-of]")) part.hidden = Number(part.dataset.of) !== chosen();
    filter();
  }

  function drawDepths() {
    for (const place of document.querySelectorAll("details[open] [data-depth]")) draw(place, page.depths[Number(place.dataset.depth)]);
  }

  function drawAll() {
    drawGroup();
    drawDepths();
  }

  // ---- the table
  const results = document.getElementById("results");
  const body = results.tBodies[0];
  const words = document.getElementById("filter");
  const onlyFront = document.getElementById("front");
  const onlyChosen = document.getElementById("chosen");

  function filter() {
    const asked = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      const fits = asked.every((word) => text.includes(word))
        && (!onlyFront.checked || row.dataset.standing === "front")
        && (!onlyChosen.checked || Number(row.dataset.group) === chosen());
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    document.getElementById("count").textContent = shown + " of " + body.rows.length + " rows";
  }

  function compared(a, b) {
    if (a !== "" && b !== "" && !Number.isNaN(Number(a)) && !Number.isNaN(Number(b))) return Number(a) - Number(b);
    return a.localeCompare(b, "en", { numeric: true });
  }

  function sortBy(head) {
    const index = head.cellIndex;
    const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    const value = (row) => row.cells[index].dataset.sort;
    const rows = [...body.rows].sort((one, other) => {
      const a = value(one);
      const b = value(other);
      if ((a === "") !== (b === "")) return a === "" ? 1 : -1;
      return way * compared(a, b);
    });
    body.append(...rows);
  }

  for (const head of results.tHead.rows[0].cells) head.firstElementChild.addEventListener("click", () => sortBy(head));
  words.addEventListener("input", filter);
  onlyFront.addEventListener("change", filter);
  onlyChosen.addEventListener("change", filter);
  onlyChosen.parentNode.hidden = !chooser;
  if (chooser) chooser.addEventListener("change", drawGroup);
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", drawDepths);
  for (const link of document.querySelectorAll("nav a")) link.hidden = !document.getElementById(link.hash.slice(1));
  dark.addEventListener("change", drawAll);
  drawAll();
})();
