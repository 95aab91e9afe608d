"use strict";
// Light and dark theme, the lists that select a heat map, and the tooltips of the figures.

const root = document.documentElement;
const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : darkSystem.matches;
}

// The button names the theme that a click selects.
function updateThemeButton() {
  themeButton.textContent = isDark() ? "Light theme" : "Dark theme";
}

themeButton.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  updateThemeButton();
});
darkSystem.addEventListener("change", updateThemeButton);
updateThemeButton();

for (const selector of document.querySelectorAll("select")) {
  const maps = document.getElementById(selector.id.replace("select", "plot")).children;
  const show = () => [...maps].forEach((map, n) => { map.hidden = n !== Number(selector.value); });
  selector.addEventListener("change", show);
  show(); // browsers restore the selection when a page is reloaded
}

// Return the cell under the pointer, or the nearest dot of a scatter plot within 24 pixels, or null.
function markAt(event) {
  const cell = event.target.closest(".cell");
  if (cell) return cell;
  let nearest = null;
  let least = 24;
  for (const dot of event.currentTarget.querySelectorAll(".dot[data-text]")) {
    const box = dot.getBoundingClientRect();
    const dx = box.x + box.width / 2 - event.clientX;
    const dy = box.y + box.height / 2 - event.clientY;
    const distance = Math.hypot(dx, dy);
    if (distance < least) [nearest, least] = [dot, distance];
  }
  return nearest;
}

const tip = document.getElementById("tip");

function showTip(event) {
  const mark = markAt(event);
  tip.hidden = mark === null;
  if (mark === null) return;
  tip.textContent = mark.dataset.text;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, root.clientWidth - width - 8);
  const above = event.clientY - height - 14;
  tip.style.left = Math.max(left, 8) + "px";
  tip.style.top = (above < 8 ? event.clientY + 20 : above) + "px";
}

function hideTip() {
  tip.hidden = true;
}

document.addEventListener("pointerdown", hideTip, { capture: true });
document.addEventListener("scroll", hideTip, { passive: true });
for (const canvas of document.querySelectorAll(".canvas")) {
  canvas.addEventListener("pointermove", showTip);
  canvas.addEventListener("pointerdown", showTip);
  // A finger leaves the screen after every tap; the tooltip stays until the next tap.
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hideTip(); });
}
