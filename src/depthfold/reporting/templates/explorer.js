"use strict";
// The explorer: a slider over the plans, and the network of the selected plan. view.py writes the data: every segment
// once, [i, j, ms with an activation at j, ms without, ms of its separate layers or null, shape], and plans as lists
// of indices of segments. Segments with dropped layers or branches also have { layers, branches }, and those with a time
// at the floor of the calibration { floored: [without, with an activation] }. The shape is null if nothing of a segment
// is left. Positions count from 0 to L as in the paper; layer l is layers[l - 1]. Text from the data is always set as
// text, never as HTML.

(function () {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const { layers, segments, plans, original, inserted, skips, barriers, chosen, best } = data;
  const own = layers.flatMap((layer, n) => (layer.activation === null ? [] : [n + 1]));
  const longest = Math.max(...segments.map(([, , active, inactive, replaced]) => Math.max(active, inactive, replaced ?? 0)));
  const slider = document.getElementById("budget");
  const byId = (id) => document.getElementById(id);
  const canvas = document.querySelector("#plot-frontier .canvas");
  const dots = [...canvas.querySelectorAll(".dot[data-text]")];

  const minus = (text) => text.replace("-", "\u2212");
  // Keep trailing zeros, so that columns line up (2.90 and 0.729), and avoid exponents.
  const digits = (value, count = 4) => {
    const text = value.toPrecision(count);
    return minus(text.includes("e") ? Number(text).toString() : text);
  };
  const ms = (value, count = 4) => digits(value, count) + "\u202fms";
  const perCent = (share) => (100 * share).toFixed(1) + "\u202f%";

  function element(tag, className, ...content) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...content.filter((part) => part !== null));
    return made;
  }

  const plural = (number, one, several) => number + " " + (number === 1 ? one : several);

  // Return the layers of dropped branches, with the start of their branch.
  function inBranches(branches) {
    const found = new Map();
    for (const [i, j] of branches) for (let l = i + 1; l <= j; l++) if (!found.has(l)) found.set(l, i);
    return found;
  }

  // Return the segments of a plan in full, and the activations that it keeps, removes and inserts.
  function decode(plan) {
    const kept = new Set(plan.activations);
    const native = new Set(own);
    const parts = plan.segments.map((index) => {
      const [i, j, active, inactive, replaced, shape, more = {}] = segments[index];
      const { layers: single = [], branches = [], floored = [false, false] } = more;
      const gone = inBranches(branches);
      const missing = new Set([...single, ...gone.keys()]);
      const merged = j - i - missing.size > 1;
      const time = kept.has(j) ? active : inactive;
      return { i, j, time, floor: floored[Number(kept.has(j))], replaced, shape, merged, gone, missing, branches };
    });
    return {
      plan,
      parts,
      missing: new Set(parts.flatMap((part) => [...part.missing])),
      branches: parts.flatMap((part) => part.branches),
      kept,
      removed: own.filter((position) => !kept.has(position)),
      added: plan.activations.filter((position) => !native.has(position)),
      merged: parts.filter((part) => part.merged).length,
    };
  }

  function budgetText({ plan }) {
    return ms(plan.ms) + (original ? ", " + perCent(plan.ms / original) + " of the original" : "");
  }

  function dropText({ parts, missing, branches }) {
    if (missing.size === 0) return "";
    const inside = parts.reduce((sum, part) => sum + part.gone.size, 0);
    const which = inside === 0 ? "" : `, of which ${inside} in ${plural(branches.length, "residual branch", "residual branches")}`;
    return ` Dropped: ${plural(missing.size, "layer", "layers")}${which}.`;
  }

  function summary(index, state) {
    const { plan, parts, removed, added, merged } = state;
    const convolutions = parts.filter((part) => part.shape !== null).length;
    const which = index === chosen ? "The chosen plan" : "Plan " + (index + 1) + " of " + plans.length;
    const faster = original && plan.ms ? ", " + (original / plan.ms).toFixed(2) + " times as fast as the original" : "";
    return (
      `${which}: ${ms(plan.ms)} predicted${faster}, importance ${digits(plan.importance)}. ` +
      `Convolutions: ${layers.length} before, ${convolutions} after, of which ${merged} merged. ` +
      `Activations: ${own.length} before, of which ${removed.length} removed; ${added.length} inserted.` +
      dropText(state)
    );
  }

  // Return the activation after layer l. The state is also in hidden text, for screen readers.
  function mark(l, { kept }) {
    const name = layers[l - 1].activation;
    if (name === null && !kept.has(l)) return null;
    const state = name === null ? "inserted" : kept.has(l) ? "kept" : "removed";
    return element("span", "mark " + state, name ?? inserted ?? "activation", element("span", "unseen", " is " + state));
  }

  function layerLine(l, part, state) {
    const { name, shape } = layers[l - 1];
    // Skips inside a dropped branch are dropped with it.
    const additions = skips
      .filter(([source, target]) => target === l && (part.gone.get(l) ?? source) >= source)
      .map(([source]) => {
        if (part.gone.has(l)) return element("span", "aside", `only the skip from ${source} is left`);
        const merged = source >= part.i && part.shape !== null && part.j > part.i + 1 ? ", merged" : "";
        return element("span", "aside", `+ skip from ${source}${merged}`);
      });
    const marks = element("span", "marks", mark(l, state), ...additions);
    return element("p", "layer", element("span", "name", name), layerShape(l, part, shape), marks);
  }

  function layerShape(l, part, shape) {
    if (!part.missing.has(l)) return element("span", "", shape);
    const how = part.gone.has(l) ? " dropped with its branch" : " dropped";
    return element("span", "dropped", element("s", "", shape), how);
  }

  function times({ time, floor, replaced, merged, missing }) {
    const after = ms(time, 3) + (floor ? " (floor)" : "");
    const changed = merged || missing.size > 0;
    const text = changed && replaced !== null ? `${digits(replaced, 3)} \u2192 ${after}` : after;
    const bars = element("div", "bars", element("i", "before"), element("i", "after"));
    bars.setAttribute("aria-hidden", "true");
    bars.children[0].style.width = (100 * (replaced ?? 0)) / longest + "%";
    bars.children[1].style.width = (100 * time) / longest + "%";
    return element("div", "times", element("p", "", element("span", "unseen", "Time "), text), bars);
  }

  function outcome({ j, merged, missing, shape }, { kept }) {
    const left = kept.has(j) ? "only an activation" : "nothing";
    if (shape === null) return element("p", "", "\u2192 ", element("strong", "", left), ", no convolution");
    if (merged || missing.size > 0) return element("p", "", "\u2192 one ", element("strong", "", shape));
    return element("p", "aside", "not merged");
  }

  function blockItem(part, state) {
    const { i, j, merged, missing } = part;
    const which = j > i + 1 ? `Layers ${i + 1}\u2013${j}` : `Layer ${j}`;
    const before = element("div", "before");
    for (let l = i + 1; l <= j; l++) before.append(layerLine(l, part, state));
    const becomes = element("div", "becomes", outcome(part, state));
    if (barriers.includes(j)) becomes.append(element("p", "aside", "Followed by a barrier: no merge crosses it."));
    const changed = merged || missing.size > 0 || state.removed.includes(j) || state.added.includes(j);
    const names = ["block", merged && "merged", missing.size > 0 && "drops", !changed && "same", barriers.includes(j) && "barrier"];
    const item = element(
      "li", names.filter(Boolean).join(" "), element("p", "which", which), before, becomes, times(part)
    );
    item.dataset.i = i;
    item.dataset.j = j;
    return item;
  }

  // Return the items of all blocks, with each run of unchanged ones folded into one item.
  function folded(state) {
    const items = [];
    let run = [];
    const close = () => {
      if (run.length > 0) items.push(fold(run));
      run = [];
    };
    for (const part of state.parts) {
      const item = blockItem(part, state);
      if (item.classList.contains("same")) {
        run.push([part, item]);
      } else {
        close();
        items.push(item);
      }
    }
    close();
    return items;
  }

  function fold(run) {
    const [first, last] = [run[0][0].i + 1, run[run.length - 1][0].j];
    const which = first < last ? `Layers ${first}\u2013${last} are unchanged` : `Layer ${first} is unchanged`;
    const total = run.reduce((sum, [part]) => sum + part.time, 0);
    const summary = element("summary", "", element("span", "", which), element("span", "", ms(total, 3)));
    const details = element("details", "", summary, element("ol", "", ...run.map(([, item]) => item)));
    details.open = byId("unchanged").checked;
    return element("li", "fold", details);
  }

  // Draw blocks with a width proportional to their time. Both strips have the same scale.
  function strip(id, pieces, scale) {
    byId(id).replaceChildren(
      ...pieces.map(({ time, merged, gone, title }) => {
        const piece = element("i", merged ? "merged" : gone === true ? "dropped" : "");
        piece.style.width = (100 * time) / scale + "%";
        piece.title = title;
        return piece;
      })
    );
  }

  function strips({ plan, parts, missing }) {
    const alone = layers.map(({ ms: time, name }, n) => {
      const gone = missing.has(n + 1);
      return { time: time ?? 0, merged: false, gone, title: gone ? name + ", dropped" : name };
    });
    const total = alone.reduce((sum, { time }) => sum + time, 0);
    const scale = Math.max(total, plan.ms) || 1;
    const known = layers.every((layer) => layer.ms !== null);
    byId("time-before").textContent = known ? ms(total) + " predicted" : "some layers have no time";
    byId("time-after").textContent = ms(plan.ms) + " predicted";
    strip("strip-before", alone, scale);
    strip("strip-after", parts.map((part) => ({ ...part, title: `(${part.i}, ${part.j}] ${part.shape ?? "nothing"}` })), scale);
  }

  function show(index) {
    const state = decode(plans[index]);
    slider.value = String(index);
    slider.setAttribute("aria-valuetext", budgetText(state));
    byId("budget-text").textContent = budgetText(state);
    byId("summary").textContent = summary(index, state);
    byId("blocks").replaceChildren(...folded(state));
    strips(state);
    for (const name of ["cx", "cy"]) byId("selected").setAttribute(name, dots[index].getAttribute(name));
  }

  slider.addEventListener("input", () => show(Number(slider.value)));
  byId("fastest").addEventListener("click", () => show(0));
  byId("chosen").addEventListener("click", () => show(chosen));
  byId("best").addEventListener("click", () => show(best));
  byId("unchanged").addEventListener("change", (event) => {
    for (const part of byId("blocks").querySelectorAll("details")) part.open = event.target.checked;
  });
  canvas.addEventListener("click", (event) => {
    const index = dots.indexOf(markAt(event));
    if (index >= 0) show(index);
  });
  show(chosen);
})();
