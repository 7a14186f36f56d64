// Zooms, moves and walks through the pictures of lanes.py. Each `.lanes` figure is on its own.
"use strict";
for (const figure of document.querySelectorAll(".lanes")) {
  const svg = figure.querySelector("svg"), axis = svg.querySelector(".axis"), said = figure.querySelector(".said");
  const lanes = [...svg.querySelectorAll(".lane")].map((lane) => [...lane.querySelectorAll(".span")]).filter((l) => l.length);
  const spans = lanes.flat(), left = +svg.dataset.left, wide = +svg.dataset.wide;
  const first = +svg.dataset.from, last = +svg.dataset.until, LEAST = (last - first) / 1e5;
  const tall = axis.querySelector("line") ? axis.querySelector("line").getAttribute("y2") : 0;
  let from = first, until = last, current = spans[0];

  const made = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const x = (second) => left + (wide * (second - from)) / (until - from);

  function draw() {
    for (const span of spans) {
      const start = +span.dataset.start, end = start + +span.dataset.seconds, [rect, text] = span.querySelectorAll("rect, text");
      const begin = Math.max(start, from), stop = Math.min(end, until), shows = start <= until && end >= from;
      span.classList.toggle("aside", !shows); // it can still be walked to, which brings it back
      if (!shows) continue;
      const room = Math.max(x(stop) - x(begin), 0.75);
      rect.setAttribute("x", x(begin));
      rect.setAttribute("width", room);
      text.setAttribute("x", x(begin) + 3);
      text.setAttribute("visibility", 6.3 * text.textContent.length + 6 <= room ? "visible" : "hidden");
    }
    const rough = (until - from) / 8, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => power * times).find((each) => each >= rough);
    const [unit, name] = [[1, "s"], [1e-3, "ms"]].find(([u]) => last >= u) || [1e-6, "us"];
    const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
    axis.replaceChildren();
    for (let i = Math.ceil(from / step); i * step <= until + 1e-9 * step; i++) {
      axis.append(made("line", { x1: x(i * step), x2: x(i * step), y1: 20, y2: tall, stroke: "currentColor", "stroke-opacity": 0.2 }));
      const number = made("text", { x: x(i * step), y: 16, "text-anchor": "middle", fill: "currentColor" });
      number.textContent = `${((i * step) / unit).toFixed(digits)} ${name}`;
      axis.append(number);
    }
  }
  function show(a, b) {
    const long = Math.min(Math.max(b - a, LEAST), last - first);
    from = Math.min(Math.max(a, first), last - long);
    until = from + long;
    draw();
  }
  function zoom(factor, at = (from + until) / 2) {
    show(at - (at - from) * factor, at + (until - at) * factor);
  }
  const move = (part) => show(from + part * (until - from), until + part * (until - from));
  const doing = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25), all: () => show(first, last) };
  const second = (event) => {
    const box = svg.getBoundingClientRect(), pixels = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
    return from + ((Math.min(Math.max(pixels, left), left + wide) - left) / wide) * (until - from);
  };

  function tell(span) { said.textContent = span.getAttribute("aria-label"); }
  function reveal(span) { // all of it, if there is room
    const start = +span.dataset.start, end = start + +span.dataset.seconds, shown = until - from;
    const cut = start < from - 1e-3 * shown || end > until + 1e-3 * shown, fits = end - start < shown;
    const middle = fits ? (start + end) / 2 : start + shown / 2;
    if (cut && (fits || start > until || end < from)) show(middle - shown / 2, middle + shown / 2);
  }
  function arrive(span) { // it has the focus
    current.setAttribute("tabindex", "-1");
    current = span;
    current.setAttribute("tabindex", "0");
    if (span.matches(":focus-visible")) reveal(span); // not where a drag begins
    tell(span);
  }
  const go = (span) => span && span.focus();
  function near(way) { // the bar of the next lane that is nearest in time
    const at = lanes.findIndex((lane) => lane.includes(current)), lane = lanes[at + way];
    const middle = +current.dataset.start;
    return lane && lane.reduce((a, b) => (Math.abs(b.dataset.start - middle) < Math.abs(a.dataset.start - middle) ? b : a));
  }
  function beside(way) {
    const lane = lanes.find((each) => each.includes(current));
    return lane[lane.indexOf(current) + way];
  }
  const keys = {
    "+": doing.in, "=": doing.in, "-": doing.out, 0: doing.all,
    ArrowLeft: () => go(beside(-1)), ArrowRight: () => go(beside(1)), ArrowUp: () => go(near(-1)), ArrowDown: () => go(near(1)),
    Home: () => go(lanes.find((each) => each.includes(current))[0]), End: () => go(lanes.find((each) => each.includes(current)).at(-1)),
  };

  figure.querySelector(".tools").hidden = false;
  if (current) current.setAttribute("tabindex", "0");
  for (const span of spans) {
    span.addEventListener("mouseenter", () => tell(span));
    span.addEventListener("focus", () => arrive(span));
    span.addEventListener("click", () => go(span));
  }
  figure.querySelector(".tools").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) doing[button.dataset.do]();
  });
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, second(event));
  }, { passive: false });
  let held = null;
  svg.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from, until }; });
  window.addEventListener("pointerup", () => { held = null; });
  window.addEventListener("pointermove", (event) => {
    if (!held) return;
    const scale = (svg.viewBox.baseVal.width / svg.getBoundingClientRect().width / wide) * (held.until - held.from);
    show(held.from - (event.clientX - held.x) * scale, held.until - (event.clientX - held.x) * scale);
  });
}
