"use strict";
(() => {
  const root = document.documentElement;
  const read = (key) => JSON.parse(document.getElementById(key).textContent);
  const themes = read("themes");
  const holders = [...document.querySelectorAll(".plot")];
  const button = document.getElementById("theme");
  const wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
  const onPaper = window.matchMedia("print");
  const PAPER = 680; // width of a plot on paper, in pixels: A4 within its margins
  let printing = onPaper.matches;

  // A page that is opened from the disk may not be allowed to remember anything.
  const remember = (value) => { try { localStorage.setItem("coterie-theme", value); } catch { /* then it is not */ } };
  const remembered = () => { try { return localStorage.getItem("coterie-theme"); } catch { return null; } };

  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wantsDark.matches);
  const template = () => themes[dark() && !printing ? "dark" : "light"];
  const size = () => (printing ? { width: PAPER, autosize: false } : { width: null, autosize: true });

  const config = (key) => ({
    responsive: true,
    displaylogo: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: key },
  });

  function draw(holder, variant = 0) {
    const key = holder.dataset.key;
    const figure = read(`figure-${key}-${variant}`);
    holder.style.minHeight = `${figure.layout.height}px`;
    const layout = { ...figure.layout, ...size(), template: template() };
    holder.dataset.variant = variant;
    return Plotly.newPlot(holder, { data: figure.data, layout, frames: figure.frames, config: config(key) });
  }

  const isDrawn = (holder) => holder.classList.contains("js-plotly-plot");

  // One after the other, so that the page can be read and scrolled meanwhile.
  async function drawAll() {
    for (const holder of holders) {
      if (!isDrawn(holder)) {
        await draw(holder);
        await new Promise((next) => setTimeout(next));
      }
    }
    root.dataset.ready = "true";
  }

  function refresh() {
    for (const holder of holders) {
      if (isDrawn(holder)) Plotly.relayout(holder, { template: template(), ...size() });
      else if (printing) draw(holder);
    }
  }

  function name() {
    button.textContent = dark() ? "Light colours" : "Dark colours";
    button.setAttribute("aria-pressed", String(dark()));
  }

  function print(on) {
    if (on === printing) return;
    printing = on;
    refresh();
  }

  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  name();
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
    name();
    refresh();
  });
  wantsDark.addEventListener("change", () => { name(); refresh(); });
  onPaper.addEventListener("change", (event) => print(event.matches));
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));

  for (const choice of document.querySelectorAll(".choice select")) {
    choice.addEventListener("change", () => {
      draw(document.getElementById(`plot-${choice.dataset.of}`), choice.value);
      for (const note of document.querySelectorAll(`.note[data-of="${choice.dataset.of}"]`)) {
        note.hidden = note.dataset.variant !== choice.value;
      }
    });
  }

  // A table is sorted by the column whose head is chosen, within its sections. What is no number comes last.
  const UNITS = { kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
  const text = (cell) => [...cell.childNodes].filter((node) => node.nodeName !== "SUP")
    .map((node) => node.textContent).join("").trim();
  function number(words) {
    const found = words.match(/^([+-]?[\d.]+(?:e[+-]?\d+)?)\s*(kB|MB|GB|TB)?/);
    return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) : NaN;
  }
  function sort(head) {
    const heads = [...head.parentElement.children];
    const column = heads.indexOf(head);
    const numeric = head.classList.contains("number");
    // Numbers are first wanted from the greatest down, words from A to Z.
    const before = head.getAttribute("aria-sort");
    const descending = before === "none" ? numeric : before === "ascending";
    for (const each of heads) each.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const sign = descending ? -1 : 1;
    for (const body of head.closest("table").tBodies) {
      const keyed = [...body.rows].map((row) => [row, text(row.cells[column])]);
      keyed.sort(([, one], [, other]) => {
        if (!numeric) return sign * one.localeCompare(other, undefined, { numeric: true });
        const [a, b] = [number(one), number(other)];
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return sign * (a - b);
      });
      body.append(...keyed.map(([row]) => row));
    }
  }
  for (const head of document.querySelectorAll("thead th")) {
    if ([...head.closest("table").tBodies].every((body) => body.rows.length < 2)) continue;
    head.setAttribute("aria-sort", "none");
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", (event) => {
      if (!["Enter", " "].includes(event.key)) return;
      event.preventDefault();
      sort(head);
    });
  }

  for (const copy of document.querySelectorAll(".copy")) {
    copy.addEventListener("click", async () => {
      const text = copy.nextElementSibling;
      try {
        await navigator.clipboard.writeText(text.textContent);
        copy.textContent = "Copied";
        setTimeout(() => { copy.textContent = "Copy"; }, 1500);
      } catch {
        window.getSelection().selectAllChildren(text);
      }
    });
  }

  drawAll();
})();
