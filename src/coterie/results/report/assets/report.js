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
