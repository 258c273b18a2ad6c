// Draws every <figure class="chart" data-chart="..."> of a page as an SVG; see chart.py for what data-chart holds.
"use strict";
(() => {
  const HEIGHT = 260, LEFT = 58, RIGHT = 28, TOP = 10, BOTTOM = 38, NUM_COLORS = 8, DASHES = ["", "7 4", "2 3", "9 3 2 3"];
  const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];
  const STORED = "charts " + location.pathname;

  function svg(name, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  }

  const html = (name, attributes = {}, text = "") =>
    Object.assign(document.createElement(name), attributes, text ? { textContent: text } : {});

  function formatNumber(value, mostPlain = 1e9) {
    if (value === null || !Number.isFinite(value)) return "not finite";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= mostPlain)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
    if (Number.isInteger(value) || size >= 1e5) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  }

  function formatTime(seconds) {
    if (seconds < 120) return `${Number(seconds.toFixed(1))} s`;
    return seconds < 7200 ? `${Number((seconds / 60).toFixed(1))} min` : `${Number((seconds / 3600).toFixed(1))} h`;
  }

  function multiples(step, low, high) {
    const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: Math.max(count, 0) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  }

  function linearTicks(low, high, most) {
    const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
    return multiples([1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999), low, high);
  }

  function logTicks(low, high, most) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), every = Math.ceil((last - first) / most);
    const factors = 3 * (last - first) <= 2 * most ? [1, 2, 5] : [1], ticks = [];
    for (let power = first; power <= last; power += every) ticks.push(...factors.map(factor => factor * 10 ** power));
    const shown = ticks.filter(tick => tick >= low * 0.999 && tick <= high * 1.001);
    return shown.length > 1 ? shown : linearTicks(low, high, most);
  }

  function timeTicks(low, high, most) {
    const rough = (high - low) / most;
    return rough * most < 2 ? linearTicks(low, high, most)
      : multiples(TIMES.find(size => size >= rough) ?? 86400 * Math.ceil(rough / 86400), low, high);
  }

  /** An axis of one chart: from values to pixels and back. */
  function scale(low, high, from, to, log) {
    const value = log ? Math.log10 : Number, back = log ? x => 10 ** x : Number;
    if (low === high) [low, high] = log ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
    const ratio = (to - from) / (value(high) - value(low));
    return { low, high, pixel: x => from + (value(x) - value(low)) * ratio, at: pixel => back(value(low) + (pixel - from) / ratio) };
  }

  /** Exponential means without the bias of the first points. weight: of what lies `unit` back on the axis x. */
  function smoothed(x, values, weight, unit) {
    let sum = 0, total = 0, last = x[0];
    return values.map((value, i) => {
      if (value === null) return null;
      const decay = weight ** ((x[i] - last) / unit);
      last = x[i];
      sum = decay * sum + (1 - weight) * value;
      total = decay * total + (1 - weight);
      return sum / total;
    });
  }

  const nearest = (values, x) => values.reduce((best, value, i) => Math.abs(value - x) < Math.abs(values[best] - x) ? i : best, 0);

  class Chart {
    constructor(figure, view) {
      this.figure = figure;
      this.view = view; // of the whole page: the axis x, and how much is smoothed
      this.data = JSON.parse(figure.dataset.chart);
      this.hidden = new Set();
      this.zoom = null; // the values of x that a drag has chosen
      this.log = view.log[this.data.title] ?? this.data.log;
      this.head = html("figcaption");
      this.tip = html("div", { className: "chart-tip", hidden: true });
      figure.replaceChildren(this.head, this.tip);
      let named = 0;
      for (const one of this.data.series) {
        const i = one.faint ? 0 : named++;
        one.color = one.faint ? "var(--quiet)" : `var(--curve-${i % NUM_COLORS})`;
        one.dash = DASHES[Math.floor(i / NUM_COLORS) % DASHES.length];
      }
      this.draw();
      new ResizeObserver(() => { if (this.drawnWidth !== figure.clientWidth) this.draw(); }).observe(figure);
    }

    get axis() {
      const axes = Object.keys(this.data.series[0].x);
      return axes.includes(this.view.axis) ? this.view.axis : axes[0];
    }

    formatX(x) { return this.data.names?.[x] ?? (this.axis === "time" ? formatTime(x) : formatNumber(x)); }

    drawHead() {
      const button = (className, title, text, onclick) => {
        const made = html("button", { type: "button", className, title, onclick: () => { onclick(); this.draw(); } }, text);
        this.head.append(made);
        return made;
      };
      this.head.replaceChildren(html("b", {}, this.data.title));
      this.data.series.forEach((one, i) => {
        if (one.faint) return;
        const entry = button("chart-name", "show or hide", one.name, () => this.hidden.delete(i) || this.hidden.add(i));
        const mark = svg("svg", { width: 22, height: 10, "aria-hidden": true });
        mark.append(svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: one.color, "stroke-width": 3, "stroke-dasharray": one.dash }));
        entry.prepend(mark);
        entry.setAttribute("aria-pressed", !this.hidden.has(i));
      });
      button("chart-log", "scale of the values", this.log ? "log" : "linear", () => {
        this.log = this.view.log[this.data.title] = !this.log;
        this.view.save();
      });
    }

    draw() {
      const width = this.figure.clientWidth;
      if (!width) return;
      this.drawnWidth = width;
      this.drawHead();
      this.tip.hidden = true;
      this.picture?.remove();
      this.picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": this.data.title });
      this.figure.append(this.picture);
      const shown = this.data.series.filter((_, i) => !this.hidden.has(i)).map(one => this.visible(one));
      const points = shown.flatMap(one => [one.y, one.smooth ?? []].flatMap(values => values.map((y, i) => [one.x[i], y]))).filter(point => this.isDrawn(point));
      if (!points.length) {
        this.picture.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to draw on this scale"));
        return;
      }
      const range = place => points.reduce(([low, high], point) => [Math.min(low, point[place]), Math.max(high, point[place])], [Infinity, -Infinity]);
      const [bottom, top] = range(1), span = top - bottom || Math.abs(top) / 10; // wide intervals leave the values room
      const ends = shown.flatMap(one => one.half?.flatMap((half, i) => this.isDrawn([one.x[i], one.y[i]]) ? [one.y[i] - half, one.y[i] + half] : []) ?? []);
      const low = Math.max(Math.min(bottom, ...ends), bottom - span), high = Math.min(Math.max(top, ...ends), top + span);
      const edge = this.data.names ? 0.4 : 0, [left, right] = this.zoom ?? range(0).map((x, i) => x + (i ? edge : -edge));
      this.x = scale(left, right, LEFT, width - RIGHT, this.data.logX);
      this.y = scale(this.log && low <= 0 ? bottom : low, high, HEIGHT - BOTTOM, TOP, this.log);
      this.drawAxes(width);
      [...shown].reverse().forEach(one => this.drawSeries(one)); // the first lies on top
      this.listen(width, shown);
    }

    isDrawn([x, y]) {
      return y !== null && !(this.log && y <= 0) && (!this.zoom || (x >= this.zoom[0] && x <= this.zoom[1]));
    }

    /** What of a series is drawn now: its values over the chosen axis, and its means. */
    visible(one) {
      const x = one.x[this.axis], weight = this.view.smoothing;
      if (!weight || one.dots || one.half) return { ...one, x };
      const unit = Math.min(...this.data.series.map(({ x: { [this.axis]: all } }) => (all.at(-1) - all[0]) / (all.length - 1)).filter(gap => gap > 0));
      return { ...one, x, smooth: smoothed(x, one.mean ?? one.y, weight, unit) };
    }

    drawAxes(width) {
      const add = (name, attributes, text) => this.picture.append(svg(name, attributes, text));
      const most = Math.max(2, Math.floor((width - LEFT - RIGHT) / 80)), { unit } = this.data;
      let ticks = (this.axis === "time" ? timeTicks : this.data.logX ? logTicks : linearTicks)(this.x.low, this.x.high, most);
      if (this.axis === "step" || this.data.names) ticks = ticks.filter(Number.isInteger);
      for (const tick of ticks) {
        const x = this.x.pixel(tick);
        add("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM });
        add("text", { x, y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, this.formatX(tick));
      }
      for (const tick of (this.log ? logTicks : linearTicks)(this.y.low, this.y.high, 5)) {
        const y = this.y.pixel(tick);
        add("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y });
        add("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, formatNumber(tick, 1e5));
      }
      const name = this.zoom ? `${this.axis} (double-click shows all)` : this.axis;
      add("text", { class: "axis", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, name);
      if (unit) add("text", { class: "axis", x: -HEIGHT / 2 + BOTTOM / 2, y: 11, transform: "rotate(-90)", "text-anchor": "middle" }, unit);
    }

    drawSeries(one) {
      const line = (values, attributes) => {
        const pieces = [[]]; // a value that is not finite interrupts the line
        values.forEach((value, i) => {
          if (!this.isDrawn([one.x[i], value])) return value === null && pieces.push([]);
          if (one.dots && pieces.at(-1).length) pieces.push([]);
          pieces.at(-1).push([this.x.pixel(one.x[i]).toFixed(1), this.y.pixel(value).toFixed(1)]);
        });
        for (const piece of pieces.filter(piece => piece.length)) {
          const [cx, cy] = piece[0], style = { fill: "none", stroke: one.color, "stroke-dasharray": one.dash };
          this.picture.append(piece.length > 1 ? svg("polyline", { points: piece.join(" "), ...style, ...attributes })
            : svg("circle", { cx, cy, r: one.dots ? 2.5 : 3.5, fill: one.color, opacity: one.dots ? 0.6 : 1 }));
        }
      };
      line(one.y, one.faint ? { "stroke-width": 1, opacity: one.smooth ? 0.08 : 0.3 } : { "stroke-width": 1.6, opacity: one.smooth ? 0.25 : 1 });
      one.half?.forEach((half, i) => { // points with their intervals, up to the edges of the picture
        if (!this.isDrawn([one.x[i], one.y[i]])) return;
        const cx = this.x.pixel(one.x[i]), end = value => this.y.pixel(Math.min(Math.max(value, this.y.low), this.y.high));
        this.picture.append(svg("circle", { cx, cy: this.y.pixel(one.y[i]), r: 3.5, fill: one.color }));
        if (half) this.picture.append(svg("line", { x1: cx, x2: cx, y1: end(one.y[i] - half), y2: end(one.y[i] + half), stroke: one.color, "stroke-width": 1.2 }));
      });
      if (one.smooth) line(one.smooth, one.faint ? { "stroke-width": 1, opacity: 0.3 } : { "stroke-width": 2.2 });
    }

    /** The pointer shows the values at the nearest x; a drag zooms. */
    listen(width, shown) {
      const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      const chosen = svg("rect", { class: "chosen", y: TOP, height: HEIGHT - BOTTOM - TOP, visibility: "hidden" });
      this.picture.append(cursor, chosen);
      const pixelOf = event => Math.min(Math.max(event.clientX - this.picture.getBoundingClientRect().left, LEFT), width - RIGHT);
      let began = null;
      this.picture.onpointerdown = event => { began = pixelOf(event); this.picture.setPointerCapture(event.pointerId); };
      this.picture.onpointermove = event => {
        const pixel = pixelOf(event);
        if (began !== null) {
          const area = { x: Math.min(began, pixel), width: Math.abs(began - pixel), visibility: "visible" };
          for (const [key, value] of Object.entries(area)) chosen.setAttribute(key, value);
        }
        this.showValues(cursor, shown, this.x.at(pixel), width);
      };
      this.picture.onpointerup = event => {
        const [from, to] = [began, pixelOf(event)].sort((a, b) => a - b);
        began = null;
        chosen.setAttribute("visibility", "hidden");
        if (to - from < 6) return;
        this.zoom = [this.x.at(from), this.x.at(to)];
        this.draw();
      };
      this.picture.ondblclick = () => { this.zoom = null; this.draw(); };
      this.picture.onpointerleave = () => { this.tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    }

    showValues(cursor, shown, wanted, width) {
      const found = shown.filter(one => one.x.length && !one.faint).map(one => ({ one, i: nearest(one.x, wanted) }));
      const [x] = found.map(({ one, i }) => one.x[i]).sort((a, b) => Math.abs(a - wanted) - Math.abs(b - wanted));
      if (x === undefined) return;
      const pixel = this.x.pixel(x);
      for (const [key, value] of Object.entries({ x1: pixel, x2: pixel, visibility: "visible" })) cursor.setAttribute(key, value);
      this.tip.replaceChildren(html("b", {}, `${this.axis} ${this.formatX(x)}`));
      for (const { one, i } of found) {
        const row = html("div"), at = one.x[i] === x ? "" : ` at ${this.formatX(one.x[i])}`;
        row.append(html("span", {}, "■ "), `${one.name}: ${formatNumber((one.smooth ?? one.y)[i])}${one.half?.[i] ? ` ± ${formatNumber(Number(one.half[i].toPrecision(2)))}` : ""}${at}`);
        row.firstChild.style.color = one.color;
        this.tip.append(row);
      }
      this.tip.hidden = false;
      const left = pixel + 14 + this.tip.offsetWidth < width ? pixel + 14 : Math.max(pixel - 14 - this.tip.offsetWidth, 0);
      Object.assign(this.tip.style, { left: `${left}px`, top: `${this.picture.offsetTop + TOP + 8}px` });
    }
  }

  /** The tools above a group of charts: the axis x, and the smoothing. */
  function tools(charts, view) {
    const bar = html("div", { className: "chart-tools" }), redraw = () => { view.save(); charts.forEach(chart => chart.draw()); };
    const axes = Object.keys(charts.map(chart => chart.data.series[0].x).find(x => x.step) ?? {});
    if (axes.length > 1) {
      const select = html("select", { onchange: () => { view.axis = select.value; charts.forEach(chart => { chart.zoom = null; }); redraw(); } });
      select.append(...axes.map(axis => html("option", { value: axis, selected: axis === view.axis }, axis)));
      bar.append("over ", select);
    }
    const slider = html("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smoothing, ariaLabel: "smoothing" });
    slider.oninput = () => { view.smoothing = Number(slider.value); redraw(); };
    if (axes.length) bar.append(" smoothing ", slider);
    bar.append(html("span", { className: "quiet" }, " drag to zoom, double-click for all"));
    return bar;
  }

  for (const group of document.querySelectorAll(".charts")) {
    const view = { axis: "step", smoothing: 0, log: {} };
    try { Object.assign(view, JSON.parse(sessionStorage.getItem(STORED))); } catch { /* a page without storage */ }
    view.save = () => { try { sessionStorage.setItem(STORED, JSON.stringify(view)); } catch { /* a page without storage */ } };
    group.before(tools([...group.querySelectorAll("figure.chart")].map(figure => new Chart(figure, view)), view));
  }
  const seconds = Number(document.body.dataset.reload); // of the page of a run that goes on
  if (seconds) setInterval(() => { if (!document.querySelector("figure.chart:hover")) location.reload(); }, 1000 * seconds);
})();
