"use strict";
const $$ = (query, root = document) => [...root.querySelectorAll(query)];
const read = (root) => JSON.parse(root.querySelector('script[type="application/json"]').textContent);
const round = (value, digits = 3) => Number(value.toPrecision(digits)).toString().replace("-", "−");

// Curves: one cross-hair over all charts; the legends show the values at its step.
const charts = $$(".chart").map((root) => ({
  ...read(root), root, svg: root.querySelector("svg"), cross: root.querySelector(".cross"), values: $$(".legend b", root),
}));
function nearest(steps, step) {
  let best = 0;
  steps.forEach((at, i) => { if (Math.abs(at - step) < Math.abs(steps[best] - step)) best = i; });
  return best;
}
function point(step) {
  for (const chart of charts) {
    const [low, high, left, right] = chart.x;
    const at = step === null ? 0 : left + ((step - low) / (high - low)) * (right - left);
    chart.cross.setAttribute("x1", at);
    chart.cross.setAttribute("x2", at);
    chart.cross.style.visibility = step === null ? "hidden" : "visible";
    chart.values.forEach((cell, i) => {
      const line = chart.series[i];
      const k = step === null ? -1 : nearest(line.steps, step);
      cell.textContent = k < 0 ? cell.dataset.last
        : `${line.values[k] === null ? "not finite" : round(line.values[k], 4)} @ ${line.steps[k]}`;
    });
  }
}
for (const chart of charts) {
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect();
    const [low, high, left, right] = chart.x;
    const x = ((event.clientX - box.left) / box.width) * chart.svg.viewBox.baseVal.width;
    point(Math.round(Math.min(Math.max(low + ((x - left) / (right - left)) * (high - low), low), high)));
  });
  chart.svg.addEventListener("pointerleave", () => point(null));
}

// Transcripts: the numbers of each sampled token, in page order.
const traces = $$(".transcript").map((root) => {
  const trace = { ...read(root), root, tokens: $$(".rows .t", root), rows: $$(".row", root) };
  trace.tokens.forEach((token, i) => { token.trace = trace; token.place = i; });
  return trace;
});
const missing = (value) => value === null || value === undefined;
const log = (p) => Math.log(Math.max(p, 1e-12));
const shade = {
  credit: (trace, i) => trace.adv[i],
  gain: (trace, i) => (missing(trace.teacher[i]) || missing(trace.student[i]) ? null : log(trace.teacher[i]) - log(trace.student[i])),
  surprise: (trace, i) => (missing(trace.student[i]) ? null : -log(trace.student[i])),
  entropy: (trace, i) => trace.entropy[i],
};
const ends = {
  credit: ["discouraged", "encouraged"], gain: ["the hint speaks against it", "for it"],
  surprise: ["0", "nats"], entropy: ["0", "nats"],
};
function recolour(mode) {
  const values = traces.map((trace) => trace.tokens.map((_, i) => shade[mode](trace, i)));
  const sizes = values.flat().filter((value) => value).map(Math.abs).sort((a, b) => a - b);
  const scale = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1;
  const signed = mode === "credit" || mode === "gain";
  traces.forEach((trace, k) => trace.tokens.forEach((token, i) => {
    const value = values[k][i];
    token.classList.remove("p", "n", "q");
    if (!value) return;
    token.classList.add(signed ? (value > 0 ? "p" : "n") : "q");
    token.style.setProperty("--a", Math.min(Math.abs(value) / scale, 1).toFixed(3));
  }));
  for (const ramp of $$(".ramp")) {
    ramp.classList.toggle("seq", !signed);
    const [low, high] = ends[mode];
    ramp.querySelector(".low").textContent = signed ? `${low} −${round(scale)}` : low;
    ramp.querySelector(".high").textContent = signed ? `+${round(scale)} ${high}` : `${round(scale)} ${high}`;
  }
  for (const select of $$(".mode")) select.value = mode;
}
for (const select of $$(".mode")) select.addEventListener("change", () => recolour(select.value));

// Hover or tap: what is known of one token.
const tip = document.getElementById("tip");
function element(name, text, parent, kind = "") {
  const made = parent.appendChild(document.createElement(name));
  made.textContent = text;
  made.className = kind;
  return made;
}
function fact(list, name, value, meter) {
  element("dt", name, list);
  element("dd", value, list);
  const last = element("dd", "", list);
  if (meter !== undefined) element("i", "", last).style.width = `${100 * meter}%`;
}
function describe(token) {
  const { trace, place: i } = token;
  tip.replaceChildren();
  element("div", token.textContent.replace("\n", ""), tip, "token");
  element("div", `token ${trace.pos[i]} · ${trace.labels[trace.row[i]]}`, tip, "where");
  const list = element("dl", "", tip);
  fact(list, "credit", missing(trace.adv[i]) ? "not finite" : (trace.adv[i] > 0 ? "+" : "") + round(trace.adv[i]));
  if (!missing(trace.student[i])) fact(list, "student", round(trace.student[i]), trace.student[i]);
  if (!missing(trace.teacher[i])) {
    fact(list, "with the hint", round(trace.teacher[i]), trace.teacher[i]);
    const gain = shade.gain(trace, i);
    if (gain !== null) fact(list, "gain, nats", (gain > 0 ? "+" : "") + round(gain));
  }
  if (!missing(trace.entropy[i])) fact(list, "entropy, nats", round(trace.entropy[i]));
}
function show(token) {
  tip.hidden = !token;
  if (!token) return;
  describe(token);
  const box = token.getClientRects()[0];
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const above = box.top > tip.offsetHeight + 12;
  tip.style.left = `${window.scrollX + Math.max(8, Math.min(box.left, room))}px`;
  tip.style.top = `${window.scrollY + (above ? box.top - tip.offsetHeight - 7 : box.bottom + 7)}px`;
}
const tokenOf = (event) => { const token = event.target.closest?.(".t"); return token && token.trace ? token : null; };
document.addEventListener("pointerover", (event) => show(tokenOf(event)));
document.addEventListener("click", (event) => show(tokenOf(event)));

// A hint lights up the tokens that were re-read with it.
for (const trace of traces) {
  for (const chip of $$(".chip", trace.root)) {
    const [start, end] = chip.dataset.span.split(",").map(Number);
    const light = (on) => trace.tokens.forEach((token, i) => {
      if (trace.pos[i] >= start && trace.pos[i] < end) token.classList.toggle("lit", on);
    });
    chip.addEventListener("pointerenter", () => light(true));
    chip.addEventListener("pointerleave", () => light(false));
  }
  const strip = trace.root.querySelector(".strip");
  strip.addEventListener("click", (event) => {
    const box = strip.getBoundingClientRect();
    const total = Number(trace.rows.at(-1)?.dataset.end ?? 0);
    const at = ((event.clientX - box.left) / box.width) * total;
    trace.rows.find((row) => Number(row.dataset.end) > at)?.scrollIntoView({ behavior: "smooth", block: "center" });
  });
}
