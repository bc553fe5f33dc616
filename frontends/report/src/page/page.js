// Draws what the element `data` holds. Names are untrusted: they become text, never markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { words, lines, stays, classes, kinds } = data;
  const byId = (id) => document.getElementById(id);
  const step = Math.max(data.step, 1e-9);

  // ------------------------------------------------------------------------------------------------------ in words

  const digits = (x) => (x < 10 ? 2 : 1);
  const bytes = (n) => {
    for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (unit <= n) return (n / unit).toFixed(digits(n / unit)) + " " + name;
    }
    return n + " B";
  };
  const micros = (t) => {
    if (t < 0) return "-" + micros(-t);
    if (t < 1e3) return t.toFixed(1) + " µs";
    return t < 1e6 ? (t / 1e3).toFixed(2) + " ms" : (t / 1e6).toFixed(3) + " s";
  };
  const count = (n) => n.toLocaleString("en-US");

  /** An element with text; children may be elements or texts. */
  const element = (tag, className, ...children) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children);
    return made;
  };

  const legend = (id, names, prefix, used) => {
    names.forEach((name, k) => {
      if (used[k]) byId(id).append(element("span", "", element("i", "key " + prefix + k), name));
    });
  };

  // ------------------------------------------------------------------------------------------------------- columns

  /** For each pool: moments, and after each the bytes of every class, and of all. */
  const levels = data.pools.map((_, pool) => {
    const changes = [];
    for (let k = 0; k < stays.from.length; k++) {
      if (stays.pool[k] !== pool || stays.to[k] <= stays.from[k]) continue;
      changes.push([stays.from[k], stays.bytes[k], stays.class[k]], [stays.to[k], -stays.bytes[k], stays.class[k]]);
    }
    changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const n = classes.length;
    const times = [];
    const sums = [];
    const totals = [];
    const now = new Array(n).fill(0);
    let total = 0;
    changes.forEach(([time, change, which], k) => {
      now[which] += change;
      total += change;
      if (k + 1 === changes.length || changes[k + 1][0] !== time) {
        times.push(time);
        sums.push(now.slice());
        totals.push(total);
      }
    });
    return { times, sums, totals };
  });

  /** The last position in a sorted list whose value is not above x; -1 if none. */
  const before = (list, x) => {
    let low = 0;
    let high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] <= x) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  };

  /** For each stream, what it does, in order; what reaches into the next step is cut, and its rest stands at the start. */
  const rows = data.streams.map((_, stream) => {
    const parts = [];
    for (let k = 0; k < lines.start.length; k++) {
      if (lines.stream[k] !== stream) continue;
      let from = lines.start[k];
      let to = lines.end[k];
      const steps = Math.floor(from / step);
      from -= steps * step;
      to -= steps * step;
      while (0 < to) {
        if (Math.max(from, 0) < Math.min(to, step)) parts.push([Math.max(from, 0), Math.min(to, step), k]);
        if (to <= step) break;
        from -= step;
        to -= step;
      }
    }
    parts.sort((a, b) => a[0] - b[0]);
    return { parts, starts: parts.map((part) => part[0]) };
  });

  const usedKinds = kinds.map((_, k) => lines.kind.includes(k));
  legend("classes", classes, "c", classes.map((_, k) => stays.class.includes(k)));
  legend("kinds", kinds, "k", usedKinds);

  // ------------------------------------------------------------------------------------------------------ drawings

  const GUTTER = 78;
  const RIGHT = 14;
  const ROW = 30;
  const view = { from: 0, to: step };
  let pinned = null;
  let hovered = null;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let palette = {};
  /** Black or white, whichever is read better on a colour like #3f7fd4. */
  const readableOn = (hex) => {
    const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.32 ? "#ffffff" : "#14171c";
  };
  const readPalette = () => {
    palette = { classes: classes.map((_, k) => color("--c" + k)), kinds: kinds.map((_, k) => color("--k" + k)) };
    palette.onKinds = palette.kinds.map(readableOn);
    for (const name of ["ink", "soft", "rule", "paper", "panel", "accent", "alarm"]) palette[name] = color("--" + name);
  };

  /** Makes a canvas as large as it is shown; returns its context and size, in CSS pixels. */
  const prepare = (canvas, height) => {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(320, canvas.clientWidth);
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.clearRect(0, 0, width, height);
    return { context, width, height, ratio };
  };
  const x = (time, width) => GUTTER + ((time - view.from) / (view.to - view.from)) * (width - GUTTER - RIGHT);
  const timeAt = (pixel, width) => view.from + ((pixel - GUTTER) / (width - GUTTER - RIGHT)) * (view.to - view.from);

  const roundStep = (rough) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((m) => m * power).find((s) => rough <= s);
  };

  const timeAxis = ({ context, width }, y) => {
    const gap = roundStep((view.to - view.from) / Math.max(2, (width - GUTTER) / 120));
    context.fillStyle = palette.soft;
    context.strokeStyle = palette.rule;
    context.textAlign = "center";
    const unit = 1e6 <= view.to ? [1e6, " s"] : 1e3 <= view.to ? [1e3, " ms"] : [1, " µs"];
    const places = Math.max(0, Math.min(6, -Math.floor(Math.log10(gap / unit[0]) + 1e-9)));
    for (let k = Math.ceil(view.from / gap); k * gap <= view.to; k++) {
      const at = x(k * gap, width);
      context.beginPath();
      context.moveTo(at, y);
      context.lineTo(at, y + 4);
      context.stroke();
      if (at < width - 24) context.fillText(((k * gap) / unit[0]).toFixed(places) + unit[1], at, y + 17);
    }
  };

  const marker = ({ context, width }, height) => {
    for (const [time, style] of [[pinned, palette.ink], [hovered, palette.soft]]) {
      if (time === null || time < view.from || view.to < time) continue;
      context.strokeStyle = style;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x(time, width), 0);
      context.lineTo(x(time, width), height);
      context.stroke();
    }
  };

  /** Memory of a pool, by class: in each column of pixels the moment with most bytes, so that no peak is lost. */
  const drawMemory = (canvas, pool, height) => {
    const at = prepare(canvas, height);
    const { context, width, ratio } = at;
    const { times, sums, totals } = levels[pool];
    const { peak, limit } = data.pools[pool];
    const [top, bottom] = [18, height - 26];
    const highest = Math.max(1, peak, totals.reduce((a, b) => Math.max(a, b), 0));
    const shown = limit !== null && limit <= 1.5 * highest;
    const most = 1.06 * (shown ? Math.max(limit, highest) : highest);
    const y = (n) => bottom - (n / most) * (bottom - top);

    // Levels in a round number of the unit that the highest is in.
    const unit = 2 ** (10 * Math.min(4, Math.floor(Math.log2(most) / 10)));
    const gap = roundStep(most / unit / (height < 160 ? 3 : 6)) * unit;
    context.textAlign = "right";
    context.lineWidth = 1;
    for (let n = 0; n <= most; n += gap) {
      context.strokeStyle = palette.rule;
      context.beginPath();
      context.moveTo(GUTTER, y(n));
      context.lineTo(width - RIGHT, y(n));
      context.stroke();
      context.fillStyle = palette.soft;
      context.fillText(n === 0 ? "0" : bytes(n).replace(/\.0+ /, " "), GUTTER - 8, y(n) + 4);
    }
    const [left, right] = [Math.round(GUTTER * ratio), Math.round((width - RIGHT) * ratio)];
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    let k = Math.max(0, before(times, view.from));
    const scale = (bottom - top) * ratio / most;
    for (let pixel = left; pixel < right && times.length; pixel++) {
      const end = timeAt((pixel + 1) / ratio, width);
      let best = k;
      while (k + 1 < times.length && times[k + 1] < end) {
        k++;
        if (totals[best] < totals[k]) best = k;
      }
      let floor = bottom * ratio;
      sums[best].forEach((n, which) => {
        if (n <= 0) return;
        const tall = n * scale;
        context.fillStyle = palette.classes[which];
        context.fillRect(pixel, floor - tall, 1, tall);
        floor -= tall;
      });
    }
    context.restore();

    const level = (n, style, dash, text, align, beside) => {
      context.strokeStyle = style;
      context.fillStyle = style;
      context.setLineDash(dash);
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(GUTTER, y(n));
      context.lineTo(width - RIGHT, y(n));
      context.stroke();
      context.setLineDash([]);
      context.textAlign = align;
      context.fillText(text, align === "left" ? GUTTER + 6 : width - RIGHT - 6, y(beside) - 5);
    };
    // Words over the bars could not be read, so those of the peak go above a limit that is close.
    const crowded = shown && Math.abs(y(limit) - y(peak)) < 18;
    level(peak, palette.ink, [2, 3], "planned peak " + bytes(peak), "right", crowded ? Math.max(limit, peak) : peak);
    if (shown) level(limit, palette.alarm, [6, 4], (pool === 0 ? "budget " : "limit ") + bytes(limit), "left", limit);
    else if (limit !== null) {
      context.fillStyle = palette.alarm;
      context.textAlign = "left";
      context.fillText("↑ " + (pool === 0 ? "budget " : "limit ") + bytes(limit), GUTTER + 6, 13);
    }
    if (pool === 0 && view.from <= data.peak.at && data.peak.at <= view.to) {
      const [px, py] = [x(data.peak.at, width), y(data.peak.bytes)];
      context.beginPath();
      context.arc(px, py, 4.5, 0, 7);
      context.fillStyle = palette.paper;
      context.strokeStyle = palette.ink;
      context.lineWidth = 2;
      context.fill();
      context.stroke();
    }
    marker(at, bottom);
    timeAxis(at, bottom);
  };

  /** What the streams do. Lines narrower than a pixel share a column: the kind that takes most of it colours it. */
  const drawStreams = () => {
    const height = rows.length * (ROW + 6) + 28;
    const at = prepare(byId("streams"), height);
    const { context, width } = at;
    const [left, right] = [GUTTER, width - RIGHT];
    rows.forEach(({ parts, starts }, stream) => {
      const top = 4 + stream * (ROW + 6);
      context.fillStyle = palette.panel;
      context.fillRect(left, top, right - left, ROW);
      context.fillStyle = palette.ink;
      context.textAlign = "right";
      context.fillText(data.streams[stream].name, GUTTER - 8, top + 14);
      context.fillStyle = palette.soft;
      context.fillText(((100 * data.streams[stream].busy) / step).toFixed(0) + "%", GUTTER - 8, top + 28);
      let column = null;
      let shares = new Float64Array(kinds.length);
      const flush = () => {
        if (column === null) return;
        let best = 0;
        let sum = 0;
        shares.forEach((share, kind) => {
          sum += share;
          if (shares[best] < share) best = kind;
        });
        context.globalAlpha = Math.max(0.15, Math.min(1, sum));
        context.fillStyle = palette.kinds[best];
        context.fillRect(column, top, 1, ROW);
        context.globalAlpha = 1;
        column = null;
        shares = new Float64Array(kinds.length);
      };
      for (let k = Math.max(0, before(starts, view.from)); k < parts.length && parts[k][0] < view.to; k++) {
        const [from, to, line] = parts[k];
        if (to < view.from) continue;
        const a = Math.max(left, x(from, width));
        const b = Math.min(right, x(to, width));
        if (b - a < 1) {
          const here = Math.floor(a);
          if (here !== column) {
            flush();
            column = here;
          }
          shares[lines.kind[line]] += b - a;
          continue;
        }
        flush();
        context.fillStyle = palette.kinds[lines.kind[line]];
        // A gap between neighbours, where there is room for one.
        context.fillRect(a, top, b - a - (8 < b - a ? 1 : 0), ROW);
        if (44 < b - a) {
          context.save();
          context.beginPath();
          context.rect(a, top, b - a - 3, ROW);
          context.clip();
          context.fillStyle = palette.onKinds[lines.kind[line]];
          context.textAlign = "left";
          context.fillText(words[lines.name[line]], a + 4, top + 19);
          context.restore();
        }
      }
      flush();
    });
    marker(at, height - 24);
    timeAxis(at, height - 24);
  };

  /** The figures of the pools behind the link, and the pool of a figure. */
  const beyond = [...document.querySelectorAll("canvas.beyond")];
  const poolOf = (canvas) => Number(canvas.dataset.pool ?? 0);

  let due = false;
  const draw = () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      readPalette();
      drawMemory(byId("memory"), 0, 300);
      drawStreams();
      for (const canvas of beyond) drawMemory(canvas, poolOf(canvas), 130);
      byId("range").textContent = view.to - view.from < step ? micros(view.from) + " to " + micros(view.to) : "";
      // Tests wait for it.
      document.documentElement.dataset.drawn = "yes";
    });
  };

  const show = (from, to) => {
    const wide = Math.min(step, Math.max(step / 1e5, to - from));
    const start = Math.min(Math.max(0, from), step - wide);
    view.from = start;
    view.to = start + wide;
    draw();
  };
  const zoom = (factor, time) => show(time - (time - view.from) * factor, time + (view.to - time) * factor);
  const middle = () => (view.from + view.to) / 2;

  // --------------------------------------------------------------------------------------------------- the pointer

  const tip = byId("tip");
  const tell = (canvas, event, time, line) => {
    const parts = [];
    if (line !== null) {
      const copied = lines.bytes[line] ? ", " + bytes(lines.bytes[line]) : "";
      parts.push(element("b", "", "i" + line + " " + kinds[lines.kind[line]] + ": " + words[lines.name[line]]));
      parts.push(element("div", "", words[lines.op[line]] + copied));
      if (words[lines.module[line]]) parts.push(element("div", "", words[lines.module[line]]));
      const long = lines.end[line] - lines.start[line];
      parts.push(element("div", "", micros(lines.start[line]) + " to " + micros(lines.end[line]) + ", " + micros(long)));
    } else {
      const { times, sums, totals } = levels[poolOf(canvas)];
      const k = before(times, time);
      if (k < 0) return;
      parts.push(element("div", "", element("b", "", micros(time)), element("b", "", bytes(totals[k]))));
      for (let which = classes.length - 1; 0 <= which; which--) {
        if (sums[k][which] <= 0) continue;
        const name = element("span", "", element("i", "key c" + which), classes[which]);
        parts.push(element("div", "", name, element("span", "", bytes(sums[k][which]))));
      }
    }
    tip.replaceChildren(...parts);
    tip.hidden = false;
    const frame = byId("time").getBoundingClientRect();
    const at = event.clientX - frame.left;
    const shift = at < frame.width / 2 ? 16 : -16 - tip.offsetWidth;
    tip.style.left = at + shift + "px";
    tip.style.top = event.clientY - frame.top + 14 + "px";
  };

  const lineAt = (event, time) => {
    const stream = Math.floor((event.offsetY - 4) / (ROW + 6));
    const row = rows[stream];
    if (!row) return null;
    const part = row.parts[before(row.starts, time)];
    return part && time <= part[1] ? part[2] : null;
  };

  for (const canvas of [byId("memory"), byId("streams"), ...beyond]) {
    const id = canvas.id;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      held = { at: event.offsetX, from: view.from, to: view.to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const width = canvas.clientWidth;
      if (held) {
        const by = ((event.offsetX - held.at) / (width - GUTTER - RIGHT)) * (held.to - held.from);
        held.moved ||= 4 < Math.abs(event.offsetX - held.at);
        if (held.moved) {
          canvas.classList.add("pan");
          tip.hidden = true;
          show(held.from - by, held.to - by);
        }
        return;
      }
      const time = timeAt(event.offsetX, width);
      if (time < view.from || view.to < time) {
        tip.hidden = true;
        return;
      }
      hovered = time;
      const line = id === "streams" ? lineAt(event, time) : null;
      if (id === "streams" && line === null) tip.hidden = true;
      else tell(canvas, event, time, line);
      draw();
    });
    const release = (event) => {
      if (!held) return;
      const clicked = !held.moved && event.type === "pointerup";
      held = null;
      canvas.classList.remove("pan");
      const time = timeAt(event.offsetX, canvas.clientWidth);
      if (clicked && view.from <= time && time <= view.to) pin(time, poolOf(canvas));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => {
      hovered = null;
      tip.hidden = true;
      draw();
    });
    canvas.addEventListener("dblclick", (event) => zoom(0.25, timeAt(event.offsetX, canvas.clientWidth)));
    canvas.addEventListener("wheel", (event) => {
      // Without a key the page scrolls, as it does everywhere else.
      if (!event.ctrlKey && !event.shiftKey && !event.metaKey) return;
      event.preventDefault();
      zoom(Math.exp((event.deltaY || event.deltaX) / 400), timeAt(event.offsetX, canvas.clientWidth));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const wide = view.to - view.from;
      const keys = {
        ArrowLeft: () => show(view.from - wide / 8, view.to - wide / 8),
        ArrowRight: () => show(view.from + wide / 8, view.to + wide / 8),
        "+": () => zoom(0.5, middle()),
        "=": () => zoom(0.5, middle()),
        "-": () => zoom(2, middle()),
        0: () => show(0, step),
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
  for (const button of document.querySelectorAll("[data-zoom]")) {
    const deeds = { in: () => zoom(0.5, middle()), out: () => zoom(2, middle()), all: () => show(0, step) };
    button.addEventListener("click", deeds[button.dataset.zoom]);
  }

  // -------------------------------------------------------------------------------------------------- who is there

  const MOST_ROWS = 500;
  const pin = (time, pool) => {
    pinned = time;
    draw();
    const there = [];
    for (let k = 0; k < stays.from.length; k++) {
      if (stays.pool[k] === pool && stays.from[k] <= time && time < stays.to[k]) there.push(k);
    }
    there.sort((a, b) => stays.bytes[b] - stays.bytes[a]);
    const total = there.reduce((sum, k) => sum + stays.bytes[k], 0);
    byId("moment").textContent = micros(time) + " into the step, on the " + data.pools[pool].name + ": " + bytes(total)
      + " in " + count(there.length) + " tensors.";
    const sums = classes.map(() => [0, 0]);
    for (const k of there) {
      sums[stays.class[k]][0] += 1;
      sums[stays.class[k]][1] += stays.bytes[k];
    }
    const number = (text) => element("td", "n", text);
    const keyed = (which) => element("td", "", element("i", "key c" + which), classes[which]);
    byId("sums").tBodies[0].replaceChildren(...sums.flatMap(([n, size], which) => n === 0 ? [] : [element("tr", "",
      keyed(which), number(count(n)), number(bytes(size)), number(((100 * size) / total).toFixed(1) + "%"))]));
    const made = there.slice(0, MOST_ROWS).map((k) => element("tr", "",
      element("td", "", element("code", "", words[stays.name[k]])),
      element("td", "", words[stays.module[k]]), keyed(stays.class[k]), number(bytes(stays.bytes[k]))));
    if (MOST_ROWS < there.length) {
      made.push(element("tr", "", element("td", "", count(there.length - MOST_ROWS) + " more"), element("td"), element("td"), element("td")));
    }
    byId("there").tBodies[0].replaceChildren(...made);
  };

  // ----------------------------------------------------------------------------------------------------- decisions

  const decisions = data.decisions;
  const columns = [
    { title: "value", key: (d) => words[d.name] },
    { title: "class", key: (d) => d.class },
    { title: "means", key: (d) => d.means },
    { title: "bytes", key: (d) => d.bytes, n: true, text: (d) => bytes(d.bytes) },
    { title: "price", key: (d) => d.price ?? Infinity, n: true, text: (d) => (d.price === null ? "-" : micros(d.price)) },
    { title: "by swap", key: (d) => d.swap ?? Infinity, n: true, text: (d) => reckoned(d, d.swap) },
    { title: "by recompute", key: (d) => d.recompute ?? Infinity, n: true, text: (d) => reckoned(d, d.recompute) },
    { title: "decided for", key: (d) => d.line ?? -1, n: true, text: (d) => (d.line === null ? "-" : "line " + d.line) },
    { title: "where", key: (d) => d.where },
  ];
  // A decision without any price was not weighed: the search began with it.
  const reckoned = (d, t) => (t !== null ? micros(t) : d.price === null ? "-" : "not priced");
  const open = new Set();
  let sorted = { column: -1, down: false };
  const natural = new Intl.Collator("en", { numeric: true }).compare;
  const compare = (a, b) => (typeof a === "number" ? (a === b ? 0 : a - b) : natural(a, b));

  const group = (list) => {
    const groups = new Map();
    for (const d of list) {
      const name = words[d.block] || "(no module)";
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(d);
    }
    return groups;
  };
  /** What a group comes to: sums of bytes and prices, for its row and for sorting. */
  const summed = (name, list) => {
    const means = {};
    let [size, cost] = [0, 0];
    for (const d of list) {
      means[d.means] = (means[d.means] || 0) + 1;
      size += d.bytes;
      cost += d.price ?? 0;
    }
    const what = Object.entries(means).map(([word, n]) => n + " " + word).join(", ");
    return { name, list, size, cost, what };
  };
  const groupKey = (column, g) => [g.name, "", g.what, g.size, g.cost, g.cost, g.cost, g.list[0].line ?? -1, ""][column];

  const fill = () => {
    const wanted = byId("filter").value.trim().toLowerCase();
    const means = byId("means").value;
    const matches = (d) => (means === "" || d.means === means)
      && (wanted === "" || [words[d.name], words[d.module], d.class, d.where].some((t) => t.toLowerCase().includes(wanted)));
    const list = decisions.filter(matches);
    const groups = [...group(list)].map(([name, members]) => summed(name, members));
    const order = sorted.down ? -1 : 1;
    const column = Math.max(0, sorted.column);
    groups.sort((a, b) => order * compare(groupKey(column, a), groupKey(column, b)) || natural(a.name, b.name));
    // What was filtered to a few is shown at once.
    const few = (wanted !== "" && list.length <= 200) || groups.length === 1;
    const made = [];
    for (const g of groups) {
      const isOpen = few || open.has(g.name);
      const many = count(g.list.length) + (g.list.length === 1 ? " decision" : " decisions");
      const what = element("td", "", g.what);
      what.colSpan = 2;
      const head = element("tr", isOpen ? "group open" : "group",
        element("td", "", g.name, " ", element("small", "", many)), what, element("td", "n", bytes(g.size)),
        element("td", "n", micros(g.cost)), element("td"), element("td"), element("td"), element("td"));
      head.addEventListener("click", () => {
        if (!open.delete(g.name)) open.add(g.name);
        fill();
      });
      made.push(head);
      if (!isOpen) continue;
      const by = columns[column].key;
      const members = g.list.slice();
      if (0 <= sorted.column) members.sort((a, b) => order * compare(by(a), by(b)));
      for (const d of members) {
        made.push(element("tr", "row", ...columns.map((c, k) => {
          if (k !== 0) return element("td", c.n ? "n" : "", c.text ? c.text(d) : c.key(d));
          const inside = words[d.module].slice(words[d.block].length).replace(/^\./, "");
          return element("td", "", element("code", "", "%" + words[d.name]), " ", element("small", "", inside));
        })));
      }
    }
    if (made.length === 0) {
      const none = decisions.length ? "nothing matches" : "nothing was to be decided: everything stays on the device";
      const cell = element("td", "", none);
      cell.colSpan = columns.length;
      made.push(element("tr", "", cell));
    }
    byId("decisions").tBodies[0].replaceChildren(...made);
    byId("decisions").tHead.replaceChildren(element("tr", "", ...columns.map((c, k) => {
      const arrow = sorted.column === k ? (sorted.down ? " ↓" : " ↑") : "";
      const head = element("th", c.n ? "n" : "", c.title + arrow);
      head.addEventListener("click", () => {
        sorted = { column: k, down: sorted.column === k ? !sorted.down : Boolean(c.n) };
        fill();
      });
      return head;
    })));
    const size = list.reduce((sum, d) => sum + d.bytes, 0);
    byId("shown").textContent = count(list.length) + " of " + count(decisions.length) + ", " + bytes(size);
    const all = groups.length !== 0 && groups.every((g) => open.has(g.name));
    byId("unfold").textContent = all ? "fold all" : "unfold all";
    byId("unfold").onclick = () => {
      groups.forEach((g) => (all ? open.delete(g.name) : open.add(g.name)));
      fill();
    };
  };
  byId("filter").addEventListener("input", fill);
  byId("means").addEventListener("change", fill);
  fill();

  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
