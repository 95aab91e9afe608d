"use strict";
// The plots, and light and dark. Figures name the colours of page.css, and are painted anew when the theme changes.

const report = JSON.parse(document.getElementById("report-data").textContent);
const root = document.documentElement;
const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");

// A custom property reads as it was written, light-dark() and all; only the colour of an element is resolved.
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

function painted(value) {
  if (typeof value === "string" && value.startsWith("var(--")) {
    probe.style.color = value;
    return getComputedStyle(probe).color;
  }
  if (Array.isArray(value)) return value.map(painted);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item)]));
  }
  return value;
}

function draw(name) {
  const selector = document.getElementById("select-" + name);
  const figure = report.figures[name][selector ? Number(selector.value) : 0];
  const options = { displayModeBar: false, responsive: true };
  // painted() copies: plotly writes into what it is given, and the figure is needed again.
  Plotly.react("plot-" + name, painted(figure.data), painted(figure.layout), options);
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : darkSystem.matches;
}

function follow() {
  document.getElementById("theme").textContent = isDark() ? "Light theme" : "Dark theme"; // what a click brings
  Object.keys(report.figures).forEach(draw);
}

for (const name of Object.keys(report.figures)) {
  const selector = document.getElementById("select-" + name);
  if (selector) selector.addEventListener("change", () => draw(name));
}
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  follow();
});
darkSystem.addEventListener("change", follow);
follow();
