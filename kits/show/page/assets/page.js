"use strict";
// The page of a plan: its graph, what is selected, search, and the keyboard. The data are in the page, as the plan's own
// saved form and what facts.py says beside it; whatever comes from them is put in as text, never as markup.
// (The pictures of layouts are markup, made and escaped by drawing.py.)
(async () => {
  const $ = (selector, at = document) => at.querySelector(selector);
  const $$ = (selector, at = document) => [...at.querySelectorAll(selector)];
  const pause = () => new Promise((resolve) => setTimeout(resolve)); // no task may hold the page for long
  const SHOWN = 36; // nodes at first
  const INPUTS = 24; // inputs that are shown without being asked for
  let COLOURS = {}; // of the codes of layouts, and of the kinds of collectives: facts.py has them
  let KINDS = {};
  const colourOf = (code) => COLOURS[code] || COLOURS[code[0]] || COLOURS.R;
  const kindOf = (kind) => KINDS[kind] || "#5f6b7a";

  function el(tag, props = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== null) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return node;
  }

  function amount(value, units) {
    let [size, unit] = [value, 0];
    while (Math.abs(Number(size.toPrecision(3))) >= 1000 && unit < units.length - 1) {
      size /= 1000;
      unit += 1;
    }
    const text = Math.abs(size) >= 100 ? size.toFixed(0) : String(Number(size.toPrecision(3)));
    return `${text} ${units[unit]}`;
  }
  const bytes = (value) => amount(Math.abs(value) < 1000 ? Math.round(value) : value, ["B", "kB", "MB", "GB", "TB"]);
  const time = (seconds) => amount(seconds * 1e6, ["us", "ms", "s"]);
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

  // -- The data of one plan

  class Planned {
    static async read(root) {
      const plan = JSON.parse($(".plan-head", root).textContent);
      plan.operators = [];
      for (const part of $$(".plan-operators", root)) {
        plan.operators.push(...JSON.parse(part.textContent));
        await pause();
      }
      plan.collectives = [];
      for (const part of $$(".plan-collectives", root)) {
        plan.collectives.push(...JSON.parse(part.textContent));
        await pause();
      }
      const facts = JSON.parse($(".plan-facts", root).textContent);
      await pause();
      return new Planned(plan, facts);
    }

    constructor(plan, facts) {
      this.plan = plan;
      this.facts = facts;
      this.ops = plan.operators;
      this.firstInput = this.ops.length;
      this.firstOutput = this.firstInput + plan.inputs.length;
      this.size = this.firstOutput + plan.outputs.length;
      this.groups = facts.groups.map(([parent, kind, name, label], id) => ({
        id,
        parent,
        kind,
        name,
        label,
        children: [],
      }));
      for (const group of this.groups) if (group.parent >= 0) this.groups[group.parent].children.push(`g${group.id}`);
      facts.of.forEach((group, i) => this.groups[group].children.push(`n${i}`));
      const order = new Map();
      for (const group of [...this.groups].reverse()) {
        for (const child of group.children) if (child[0] === "n") order.set(child, Number(child.slice(1)));
        order.set(`g${group.id}`, Math.min(...group.children.map((child) => order.get(child))));
        group.children.sort((a, b) => order.get(a) - order.get(b));
      }
      this.at = Array.from({ length: this.size }, () => []); // the collectives that each node causes
      this.between = []; // [from, to, number] of those that stand between two nodes
      const byName = new Map(this.ops.map((o, i) => [o.name, i]));
      plan.outputs.forEach((t, i) => byName.set(`output ${t.name}`, this.firstOutput + i));
      plan.collectives.forEach((c, number) => {
        const crossing = facts.crossings[number];
        const to = crossing ? crossing[1] : byName.get(c.where);
        if (to !== undefined) this.at[to].push(number);
        if (crossing) this.between.push([crossing[0], crossing[1], number]);
      });
      this.inputs = new Map(plan.inputs.map((t, i) => [t.name, this.firstInput + i]));
      this.names = byName;
      this.edges = []; // [from, to]
      const link = (producer, to) => {
        const from = producer.kind === "operator" ? byName.get(producer.name) : this.inputs.get(producer.name);
        if (producer.kind !== "constant" && from !== undefined) this.edges.push([from, to]);
      };
      this.ops.forEach((o, i) => (o.producers || []).forEach((producer) => link(producer, i)));
      plan.outputs.forEach((t, i) => t.producer && link(t.producer, this.firstOutput + i));
      this.totals = this.groups.map(() => ({ seconds: 0, sent: 0, waited: 0, held: 0, operators: 0, collectives: [] }));
      const codes = this.groups.map(() => new Map());
      this.ops.forEach((o, i) => {
        const sent = this.at[i].reduce((sum, c) => sum + plan.collectives[c].wire_bytes, 0);
        const waited = this.at[i].reduce((sum, c) => sum + plan.collectives[c].predicted_time, 0);
        const key = this.codesOf(i).join(" ");
        for (let group = facts.of[i]; group >= 0; group = this.groups[group].parent) {
          const total = this.totals[group];
          total.seconds += o.seconds + (o.again || 0);
          total.sent += sent;
          total.waited += waited;
          total.held += o.held_bytes || 0;
          total.operators += 1;
          total.collectives.push(...this.at[i]);
          codes[group].set(key, (codes[group].get(key) || 0) + o.seconds + 1e-12);
        }
      });
      this.codes = codes.map((found) => [...found].sort((a, b) => b[1] - a[1])[0]?.[0].split(" ") || []);
      this.open = new Set(["g0"]);
      this.byType = this.typesOfNodes();
    }

    typesOfNodes() {
      const types = (o) => o.types || [o.result];
      return [
        ...this.ops.map(types),
        ...this.plan.inputs.map((t) => [`${t.dtype}[${t.shape.join(", ")}]`]),
        ...this.plan.outputs.map((t) => [`${t.dtype}[${t.shape.join(", ")}]`]),
      ];
    }

    codesOf(node) {
      if (node < this.firstInput) return this.ops[node].results[0] || [];
      return (
        node < this.firstOutput ? this.plan.inputs[node - this.firstInput] : this.plan.outputs[node - this.firstOutput]
      ).codes;
    }

    group(node) {
      if (node < this.firstInput) return this.facts.of[node];
      return node < this.firstOutput
        ? this.facts.of_inputs[node - this.firstInput]
        : this.facts.of_outputs[node - this.firstOutput];
    }

    path(node) {
      // the groups around it, from the outermost
      const found = [];
      for (
        let group = node[0] === "g" ? this.groups[node.slice(1)].parent : this.group(Number(node.slice(1)));
        group >= 0;
        group = this.groups[group].parent
      )
        found.unshift(`g${group}`);
      return found;
    }

    seen(node) {
      // what stands for it now: itself, or the outermost group around it that is folded
      return this.path(node).find((group) => !this.open.has(group)) || node;
    }

    around(node) {
      // the collectives that it causes, and those of what it gives
      return [
        ...new Set([...this.at[node], ...this.between.flatMap(([from, , number]) => (from === node ? [number] : []))]),
      ];
    }

    isWeight(node) {
      // what stays with the model: parameters, buffers, and what becomes of these
      if (node < this.firstInput) return false;
      return node < this.firstOutput
        ? this.plan.inputs[node - this.firstInput].role !== "input"
        : this.plan.outputs[node - this.firstOutput].role !== "result";
    }

    title(id) {
      const n = Number(id.slice(1));
      if (id[0] === "g") return this.groups[n].name || "the whole step";
      if (n < this.firstInput) return this.ops[n].name;
      return n < this.firstOutput
        ? this.plan.inputs[n - this.firstInput].name
        : `output ${this.plan.outputs[n - this.firstOutput].name}`;
    }

    label(id) {
      const n = Number(id.slice(1));
      if (id[0] === "g") {
        const group = this.groups[n];
        if (!group.label) return "the whole step";
        if (group.kind === "stack") return `${group.label}  ×${this.layers(group).length}`;
        if (group.kind === "run") return `${group.label}  (${count(this.totals[n].operators, "operator")})`;
        const alone = group.children.length === 1 && group.children[0][0] === "n" && !this.open.has(id);
        return alone ? `${group.label} · ${this.label(group.children[0])}` : group.label;
      }
      if (n >= this.firstInput) return this.title(id);
      const parts = this.ops[n].operator.split(".");
      return parts.length > 1 ? parts[1] : parts[0];
    }

    layers(group) {
      // of a stack; where there are many, runs of them stand between
      return group.children.flatMap((child) => {
        const inner = this.groups[child.slice(1)];
        return child[0] === "g" && inner.kind === "run" ? this.layers(inner) : [child];
      });
    }

    unfoldAtFirst() {
      let queue = ["g0"];
      let shown = this.groups[0].children.length;
      while (queue.length) {
        const next = [];
        for (const id of queue) {
          for (const child of this.groups[id.slice(1)].children) {
            if (child[0] !== "g") continue;
            const group = this.groups[child.slice(1)];
            if (group.kind !== "module" || group.children.length === 1 || shown + group.children.length - 1 > SHOWN)
              continue;
            shown += group.children.length - 1;
            this.open.add(child);
            next.push(child);
          }
        }
        queue = next;
      }
    }
  }

  // -- The graph

  const plans = [];
  for (const root of $$(".plan-data")) {
    plans.push(await Planned.read(root));
    await pause();
  }
  if (!plans.length) return;
  ({ codes: COLOURS, kinds: KINDS } = plans[0].facts);
  for (const planned of plans) planned.unfoldAtFirst();
  if (plans.length === 2) {
    const decided = plans.map(
      (p) => new Map(p.ops.map((o) => [`${o.name} ${o.operator}`, JSON.stringify([o.factors, o.operands, o.results])])),
    );
    plans.forEach((p, side) => {
      p.differs = new Set(
        p.ops.flatMap((o, i) =>
          decided[1 - side].get(`${o.name} ${o.operator}`) === decided[side].get(`${o.name} ${o.operator}`) ? [] : [i],
        ),
      );
    });
  }
  let current = plans[0];
  let chosen = null; // {node: "n3"} or {edge: [numbers of collectives], title}
  let withWeights = false;
  let cy = null;

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const ink = () => (dark.matches ? "#e6eaf0" : "#1b2330");
  const band = new Map(); // a band for the codes of each axis, as a picture
  function bandOf(codes) {
    const key = codes.join(" ");
    if (!band.has(key)) {
      const width = 100 / Math.max(1, codes.length);
      const rects = codes
        .map((code, i) => `<rect x="${i * width}" y="0" width="${width - 1}" height="8" fill="${colourOf(code)}"/>`)
        .join("");
      band.set(
        key,
        `data:image/svg+xml;utf8,${encodeURIComponent(`<svg xmlns="http://www.w3.org/2000/svg" width="100" height="8" viewBox="0 0 100 8" preserveAspectRatio="none">${rects}</svg>`)}`,
      );
    }
    return band.get(key);
  }

  const style = () => [
    {
      selector: "node",
      style: {
        shape: "round-rectangle",
        label: "data(label)",
        "font-size": 12,
        "font-family": "system-ui, sans-serif",
        color: ink(),
        "text-valign": "center",
        "text-halign": "center",
        width: "data(w)",
        height: 30,
        "border-width": 1.2,
        "border-color": dark.matches ? "#7b8798" : "#8d99a8",
        "background-color": dark.matches ? "#232b36" : "#ffffff",
        "background-image": "data(band)",
        "background-width": "100%",
        "background-height": 6,
        "background-position-y": "100%",
        "background-fit": "none",
        "background-clip": "node",
        "text-margin-y": -2,
      },
    },
    { selector: "node[kind = 'group']", style: { "border-width": 2, "font-weight": 600 } },
    { selector: "node[kind = 'stack']", style: { "border-width": 5, "border-style": "double", "font-weight": 600 } },
    {
      selector: "node[kind = 'input'], node[kind = 'output']",
      style: { "border-style": "dashed", "font-style": "italic" },
    },
    { selector: "node[kind = 'weight']", style: { shape: "ellipse", "font-size": 10, height: 24 } },
    { selector: "node[sends > 0]", style: { "border-color": "data(sendsColour)", "border-width": "data(sends)" } },
    {
      selector: ":parent",
      style: {
        "text-valign": "top",
        "text-halign": "center",
        "background-image": "none",
        "background-opacity": dark.matches ? 0.25 : 0.5,
        "background-color": dark.matches ? "#2a3442" : "#e8edf4",
        "border-width": 1,
        "border-style": "solid",
        padding: 12,
        "font-weight": 600,
        "text-margin-y": -2,
      },
    },
    {
      selector: "edge",
      style: {
        width: "data(width)",
        "line-color": "data(colour)",
        "target-arrow-color": "data(colour)",
        "target-arrow-shape": "triangle",
        "curve-style": "bezier",
        "arrow-scale": 0.8,
        label: "data(label)",
        "font-size": 10,
        color: ink(),
        "text-background-color": dark.matches ? "#1d232c" : "#f4f6f9",
        "text-background-opacity": 0.9,
        "text-background-padding": 2,
        "text-wrap": "wrap",
        "min-zoomed-font-size": 6,
      },
    },
    { selector: ".differs", style: { "outline-width": 4, "outline-color": "#e0a100", "outline-offset": 2 } },
    { selector: ":selected", style: { "overlay-color": "#e0a100", "overlay-opacity": 0.28, "overlay-padding": 5 } },
  ];

  const briefly = (numbers) => {
    // "2 all_reduce(dp), 17 kB"
    const kinds = new Map();
    let sent = 0;
    for (const number of numbers) {
      const c = current.plan.collectives[number];
      const key = `${c.kind}(${c.axes.join(",")})`;
      kinds.set(key, (kinds.get(key) || 0) + 1);
      sent += c.wire_bytes;
    }
    return `${[...kinds].map(([kind, n]) => (n > 1 ? `${n} ${kind}` : kind)).join(", ")}, ${bytes(sent)}`;
  };
  const dearest = (numbers) =>
    numbers.reduce((a, b) =>
      current.plan.collectives[b].predicted_time > current.plan.collectives[a].predicted_time ? b : a,
    );
  const thick = (sent) => 1.5 + Math.min(10, Math.max(0, Math.log10(1 + sent) - 1) * 1.15);
  const sum = (numbers, field) => numbers.reduce((total, n) => total + current.plan.collectives[n][field], 0);

  function elements() {
    const p = current;
    const shownInputs = p.plan.inputs.filter((t) => t.role === "input").length <= INPUTS;
    const isShown = (node) =>
      node < p.firstInput || withWeights || (!p.isWeight(node) && (shownInputs || node >= p.firstOutput));
    const reps = Array.from({ length: p.size }, (_, i) => p.seen(`n${i}`));
    const nodes = new Map();
    const add = (id) => {
      if (nodes.has(id)) return;
      const n = Number(id.slice(1));
      const group = id[0] === "g" ? p.groups[n] : null;
      const kind = group
        ? group.kind === "stack"
          ? "stack"
          : "group"
        : n < p.firstInput
          ? "op"
          : p.isWeight(n)
            ? "weight"
            : n >= p.firstOutput
              ? "output"
              : "input";
      const label = p.label(id);
      const parents = p.path(id).filter((each) => each !== "g0");
      const differs =
        p.differs && (group ? [...p.differs].some((i) => p.path(`n${i}`).includes(id)) : p.differs.has(n));
      nodes.set(id, {
        group: "nodes",
        classes: differs ? "differs" : "",
        data: {
          id,
          label,
          kind,
          parent: parents[parents.length - 1],
          w: Math.max(56, 7.4 * label.length + 22),
          band: bandOf(group ? p.codes[n] : p.codesOf(n)),
          sends: 0,
        },
      });
      parents.forEach(
        (each) =>
          nodes.has(each) ||
          nodes.set(each, {
            group: "nodes",
            data: {
              id: each,
              label: p.label(each),
              kind: "open",
              parent: p
                .path(each)
                .filter((other) => other !== "g0")
                .pop(),
              w: 40,
              band: "none",
              sends: 0,
            },
          }),
      );
    };
    for (let i = 0; i < p.size; i += 1) if (isShown(i)) add(reps[i]);
    const edges = new Map();
    const edge = (a, b) => {
      const key = `${a}>${b}`;
      if (!edges.has(key)) edges.set(key, { from: a, to: b, collectives: [] });
      return edges.get(key);
    };
    for (const [from, to] of p.edges)
      if (isShown(from) && isShown(to) && reps[from] !== reps[to]) edge(reps[from], reps[to]);
    const atWeights = new Map();
    for (const [from, to, number] of p.between) {
      const at = !isShown(from) ? reps[to] : !isShown(to) ? reps[from] : null;
      if (at) atWeights.set(at, [...(atWeights.get(at) || []), number]);
      else if (reps[from] !== reps[to]) edge(reps[from], reps[to]).collectives.push(number);
    }
    for (const [id, numbers] of atWeights) {
      const data = nodes.get(id)?.data;
      if (data) {
        data.sends = Math.min(6, 1 + thick(sum(numbers, "wire_bytes")) / 2.5);
        data.sendsColour = kindOf(p.plan.collectives[dearest(numbers)].kind);
      }
    }
    let number = 0;
    for (const each of edges.values()) {
      const here = each.collectives;
      nodes.set(`e${number}`, {
        group: "edges",
        data: {
          id: `e${number}`,
          source: each.from,
          target: each.to,
          collectives: here,
          label: here.length ? briefly(here) : "",
          width: here.length ? thick(sum(here, "wire_bytes")) : 1.2,
          colour: here.length ? kindOf(p.plan.collectives[dearest(here)].kind) : dark.matches ? "#5d6878" : "#aeb8c4",
        },
      });
      number += 1;
    }
    return [...nodes.values()];
  }

  let worker = null;
  const waiting = new Map();
  let asked = 0;
  const layoutCode = `${$("#dagre").textContent}\n;onmessage = ({ data }) => {
    const graph = new dagre.graphlib.Graph({ compound: true });
    graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: data.ranksep, marginx: 10, marginy: 10 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const node of data.nodes) graph.setNode(node.id, { width: node.w, height: node.h });
    for (const node of data.nodes) if (node.parent) graph.setParent(node.id, node.parent);
    for (const [from, to] of data.edges) graph.setEdge(from, to);
    dagre.layout(graph);
    postMessage({ number: data.number, places: data.nodes.map((node) => { const { x, y } = graph.node(node.id); return [node.id, x, y]; }) });
  };`;
  function placed(request) {
    return new Promise((resolve, reject) => {
      if (!worker) {
        worker = new Worker(URL.createObjectURL(new Blob([layoutCode], { type: "text/javascript" })));
        worker.onmessage = ({ data }) => {
          waiting.get(data.number).resolve(data.places);
          waiting.delete(data.number);
        };
        worker.onerror = (event) => {
          for (const each of waiting.values()) each.reject(new Error(event.message));
          waiting.clear();
          worker = null;
        };
      }
      request.number = asked += 1;
      waiting.set(request.number, { resolve, reject });
      worker.postMessage(request);
    });
  }

  let drawing = 0;
  async function draw(anchor = null) {
    const turn = (drawing += 1);
    $("#busy").hidden = false;
    const before = anchor && cy ? cy.getElementById(anchor).renderedPosition() : null;
    const found = elements();
    const nodes = found.filter((each) => each.group === "nodes");
    const parents = new Set(nodes.map((each) => each.data.parent).filter(Boolean));
    const labelled = found.some((each) => each.group === "edges" && each.data.label);
    const request = {
      ranksep: labelled ? 46 : 30,
      nodes: nodes.map(({ data }) => ({
        id: data.id,
        parent: data.parent,
        w: parents.has(data.id) ? 0 : data.w,
        h: data.kind === "weight" ? 24 : 32,
      })),
      edges: found.filter((each) => each.group === "edges").map(({ data }) => [data.source, data.target]),
    };
    await pause();
    let places;
    try {
      places = new Map((await placed(request)).map(([id, x, y]) => [id, { x, y }]));
    } catch (error) {
      // such as a graph that is too much for the layout: in the order of the plan
      $("#said").textContent = `The graph cannot be laid out (${error.message}); its nodes stand one below another.`;
      places = new Map(nodes.map(({ data }, i) => [data.id, { x: 0, y: 50 * i }]));
    }
    if (turn !== drawing) return;
    for (const each of nodes) if (!parents.has(each.data.id)) each.position = places.get(each.data.id);
    cy.batch(() => {
      cy.elements().remove();
      cy.add(found);
    });
    if (before && cy.getElementById(anchor).nonempty()) {
      const after = cy.getElementById(anchor).renderedPosition();
      cy.panBy({ x: before.x - after.x, y: before.y - after.y });
    } else frame();
    mark();
    $("#busy").hidden = true;
    document.documentElement.dataset.drawn = String(turn);
  }

  function frame() {
    // all of it or, where that is too small to read, its beginning
    cy.fit(undefined, 24);
    if (cy.zoom() > 1.1) {
      cy.zoom(1.1);
      cy.center();
    }
    if (cy.zoom() < 0.55) {
      const box = cy.elements().boundingBox();
      cy.zoom(0.75);
      cy.pan({ x: cy.width() / 2 - 0.75 * (box.x1 + box.w / 2), y: 24 - 0.75 * box.y1 });
    }
  }

  function mark() {
    cy.elements().unselect();
    if (chosen?.node) cy.getElementById(current.seen(chosen.node)).select();
    if (chosen?.edge)
      cy.edges()
        .filter((each) => each.data("collectives").some((n) => chosen.edge.includes(n)))
        .select();
  }

  async function fold(id) {
    if (id[0] !== "g" || id === "g0") return;
    if (current.open.has(id)) current.open.delete(id);
    else current.open.add(id);
    tree();
    await draw(id);
  }

  async function reveal(node) {
    let changed = false;
    for (const group of current.path(node))
      if (!current.open.has(group)) {
        current.open.add(group);
        changed = true;
      }
    if (changed) {
      tree();
      await draw(node);
    }
    const seen = cy.getElementById(current.seen(node));
    if (seen.nonempty()) cy.center(seen);
  }

  // -- What is selected

  const chip = (axis, code) => {
    const node = el("span", { class: "chip" }, `${axis} ${code}`);
    node.style.background = colourOf(code);
    return node;
  };
  const chips = (codes) => codes.map((code, i) => chip(current.plan.axes[i], code));
  const row = (name, ...value) =>
    value.some((each) => each !== "" && each !== null && each !== undefined)
      ? [el("dt", {}, name), el("dd", {}, ...value)]
      : [];
  const go = (id, text) =>
    el("button", { class: "link", type: "button", onclick: () => select({ node: id }, true) }, text);

  function meaning(axis, code, factor) {
    if (code[0] === "S") return `splits dim ${code.slice(1)} of the result`;
    if (code[0] === "P") return "each rank has an addend of the result";
    return factor ? `splits ${factor}; every rank has the whole result` : "every rank computes the same";
  }

  function lies(type, codes, open) {
    const found = current.facts.layouts[`${type} ${codes.join(" ")}`];
    if (!found) return [el("code", {}, type || "no tensor"), " ", ...chips(codes)];
    const summary = el("summary", {}, el("code", {}, type), " → ", el("code", {}, found.local), " ", ...chips(codes));
    const body = el("div", {});
    if (found.svg)
      body.innerHTML = found.svg; // made and escaped by drawing.py
    else body.textContent = found.words || "";
    return [el("details", open ? { open: "" } : {}, summary, body)];
  }

  function aboutAnnotation(key, text) {
    if (!text) return [];
    const cost = current.facts.annotations[key];
    return row("annotated", el("code", {}, text), ...(cost ? [el("br"), cost] : []));
  }

  function readBy(n) {
    const readers = [...new Set(current.edges.filter(([from]) => from === n).map(([, to]) => `n${to}`))];
    if (!readers.length) return [];
    const names = readers.slice(0, 30).flatMap((to, i) => [i ? ", " : "", go(to, current.title(to))]);
    return [
      el("h3", {}, "Read by"),
      el("p", {}, ...names, readers.length > 30 ? ` and ${readers.length - 30} more` : ""),
    ];
  }

  function aboutOperator(n) {
    const p = current;
    const o = p.ops[n];
    const fate =
      {
        kept: `${bytes(o.held_bytes || 0)} kept for the backward`,
        again: `computed again in the backward, ${time(o.again)}`,
        gone: "nothing is kept for the backward",
      }[o.fate] || "";
    const reads = (o.producers || []).map((producer, i) => {
      const from = producer.kind === "operator" ? p.names.get(producer.name) : p.inputs.get(producer.name);
      const type = from === undefined ? "" : p.byType[from][producer.result] || "";
      const name = producer.result ? `${producer.name}[${producer.result}]` : producer.name;
      return el(
        "li",
        {},
        from === undefined ? el("code", {}, name) : go(`n${from}`, name),
        ...lies(type, o.operands[i], false),
      );
    });
    return [
      el("h2", {}, o.name),
      el("p", {}, el("code", {}, o.operator)),
      el(
        "dl",
        {},
        ...row("module", o.module ? el("code", {}, o.module) : "the function itself"),
        ...row("source", o.source ? el("code", {}, o.source) : ""),
        ...row("strategy", el("code", {}, o.strategy)),
        ...p.plan.axes.flatMap((axis, i) =>
          row(`on ${axis}`, meaning(axis, (o.results[0] || [])[i] || "R", o.factors[i])),
        ),
        ...aboutAnnotation(`constraint:${o.name}`, o.annotation),
        ...row("computing", time(o.seconds), " forward and backward"),
        ...row("memory", fate),
      ),
      el("h3", {}, o.results.length > 1 ? "Results" : "Result"),
      ...o.results.flatMap((codes, i) => lies(p.byType[n][i] || "", codes, i === 0)),
      ...(reads.length ? [el("h3", {}, "Reads"), el("ul", {}, ...reads)] : []),
      ...readBy(n),
      ...aboutCollectives(p.around(n)),
    ];
  }

  function aboutTensor(n) {
    const p = current;
    const input = n < p.firstOutput;
    const t = input ? p.plan.inputs[n - p.firstInput] : p.plan.outputs[n - p.firstOutput];
    return [
      el("h2", {}, t.name),
      el(
        "dl",
        {},
        ...row("is", input ? t.role : `output: ${t.role}`),
        ...aboutAnnotation(t.name, t.annotation),
        ...(t.annotation ? [] : row("layout", "inferred")),
      ),
      el("h3", {}, "Layout at rest"),
      ...lies(p.byType[n][0], t.codes, true),
      ...readBy(n),
      ...aboutCollectives(p.around(n)),
    ];
  }

  function aboutGroup(n) {
    const p = current;
    const group = p.groups[n];
    const total = p.totals[n];
    const weights = p.plan.inputs.filter(
      (t) => t.role === "parameter" && group.name && t.name.startsWith(`${group.name}.`),
    );
    const layers = group.kind === "stack" ? p.layers(group) : [];
    const alone = group.children.length === 1 && group.children[0][0] === "n" ? group.children[0] : null;
    return [
      el("h2", {}, p.title(`g${n}`)),
      el(
        "p",
        {},
        group.kind === "stack"
          ? `${layers.length} layers with the same operators, strategies and collectives.`
          : group.kind === "run"
            ? "Neighbours, one after another."
            : group.name
              ? "A module."
              : "Everything.",
      ),
      el(
        "dl",
        {},
        ...(alone
          ? row("operator", go(alone, p.title(alone)))
          : row("operators", total.operators.toLocaleString("en"))),
        ...row("computing", time(total.seconds)),
        ...row(
          "collectives",
          `${total.collectives.length.toLocaleString("en")}, ${time(total.waited)}, ${bytes(total.sent)} sent by a rank`,
        ),
        ...row("kept for the backward", bytes(total.held)),
      ),
      ...(n
        ? [
            el(
              "p",
              {},
              el("button", { type: "button", onclick: () => fold(`g${n}`) }, p.open.has(`g${n}`) ? "Fold" : "Unfold"),
            ),
          ]
        : []),
      ...(layers.length
        ? [
            el("h3", {}, "Layers"),
            el("p", {}, ...layers.slice(0, 200).flatMap((id, i) => [i ? ", " : "", go(id, p.title(id))])),
          ]
        : []),
      ...(weights.length
        ? [
            el("h3", {}, "Parameters"),
            el(
              "ul",
              {},
              ...weights
                .slice(0, 40)
                .map((t) => el("li", {}, go(`n${p.inputs.get(t.name)}`, t.name), " ", ...chips(t.codes))),
              ...(weights.length > 40 ? [el("li", {}, `and ${weights.length - 40} more`)] : []),
            ),
          ]
        : []),
      ...aboutCollectives(total.collectives),
    ];
  }

  function aboutCollectives(numbers) {
    if (!numbers.length) return [el("h3", {}, "Collectives"), el("p", {}, "None.")];
    const alike = new Map();
    for (const n of numbers) {
      const first = current.facts.alike[n];
      alike.set(first, [...(alike.get(first) || []), n]);
    }
    const sorted = [...alike.values()].sort((a, b) => sum(b, "predicted_time") - sum(a, "predicted_time"));
    return [
      el("h3", {}, `Collectives: ${briefly(numbers)}`),
      el(
        "ul",
        {},
        ...sorted.slice(0, 12).map((each) => {
          const c = current.plan.collectives[each[0]];
          const times = each.length > 1 ? ` ×${each.length}` : "";
          return el(
            "li",
            {},
            el(
              "button",
              { class: "link", type: "button", onclick: () => select({ edge: each }) },
              `${c.phase} ${c.kind} over ${c.axes.join(",")} of ${c.tensor}${times}`,
            ),
            ` ${bytes(sum(each, "wire_bytes"))}, ${time(sum(each, "predicted_time"))}`,
          );
        }),
      ),
      ...(sorted.length > 12 ? [el("p", {}, `and ${sorted.length - 12} more`)] : []),
    ];
  }

  function aboutCollective(numbers) {
    const p = current;
    const n = dearest(numbers);
    const c = p.plan.collectives[n];
    const first = p.facts.alike[n];
    const same = p.facts.alike.flatMap((each, i) => (each === first ? [i] : []));
    const told = same.find((each) => p.facts.said[each]);
    const lines = told === undefined ? [] : p.facts.said[told];
    const others = [...new Set(numbers.map((each) => p.facts.alike[each]))].filter((each) => each !== first);
    const where = p.names.get(c.where);
    const tensor = p.facts.crossings[n]?.[0];
    return [
      el("h2", {}, `${c.kind} over ${c.axes.join(", ")}`),
      el(
        "dl",
        {},
        ...row(
          "of",
          tensor === undefined ? el("code", {}, c.tensor) : go(`n${tensor}`, c.tensor),
          ` (${c.dtype}), in the ${c.phase}`,
        ),
        ...row("bytes", `${bytes(c.payload_bytes)}, of which a rank sends ${bytes(c.wire_bytes)}`),
        ...row(
          "time",
          time(c.predicted_time),
          same.length > 1
            ? `; ${same.length} like it together ${time(sum(same, "predicted_time"))} and ${bytes(sum(same, "wire_bytes"))}`
            : "",
        ),
        ...row("because", `${c.producer} meets ${c.consumer}`),
        ...row(
          "for",
          where === undefined ? el("code", {}, c.where) : go(`n${where}`, c.where),
          c.path ? ` in ${c.path}` : "",
        ),
        ...row("source", c.source ? el("code", {}, c.source) : ""),
      ),
      el("h3", {}, "Why, and what without it"),
      ...(lines.length
        ? [
            ...(told !== n ? [el("p", {}, `Of the one of ${p.plan.collectives[told].tensor}, which is like it:`)] : []),
            ...lines.map((line) => el("p", {}, `${line[0].toUpperCase()}${line.slice(1)}.`)),
          ]
        : [el("p", { class: "soft" }, p.facts.unsaid)]),
      el("h3", {}, "Which ranks talk"),
      ...ranks(c),
      ...(others.length ? aboutCollectives(numbers.filter((each) => p.facts.alike[each] !== first)) : []),
    ];
  }

  function ranks(c) {
    const { axes, sizes } = current.plan;
    const total = sizes.reduce((a, b) => a * b, 1);
    const inside = axes.map((axis) => c.axes.includes(axis));
    const groups = new Map();
    const groupOf = (rank) => {
      // by the coordinates on the other axes
      let [left, key] = [rank, []];
      for (let i = axes.length - 1; i >= 0; i -= 1) {
        if (!inside[i]) key.push(left % sizes[i]);
        left = Math.floor(left / sizes[i]);
      }
      return key.join(" ");
    };
    const most = Math.min(total, 4096);
    for (let rank = 0; rank < most; rank += 1) groups.set(groupOf(rank), [...(groups.get(groupOf(rank)) || []), rank]);
    const keys = [...groups.keys()];
    const rows = axes.length > 1 ? sizes[0] : 1;
    const columns = total / rows;
    const [shownRows, shownColumns] = [Math.min(rows, 12), Math.min(columns, 12)];
    const grid = el("div", {
      class: "grid-cells",
      role: "img",
      "aria-label": `${total / c.group_size} groups of ${c.group_size} ranks`,
    });
    grid.style.gridTemplateColumns = `repeat(${shownColumns}, auto)`;
    for (let r = 0; r < shownRows; r += 1) {
      for (let k = 0; k < shownColumns; k += 1) {
        const rank = r * columns + k;
        const cell = el("span", { title: `rank ${rank}` }, String(rank));
        const hue = rank < most ? keys.indexOf(groupOf(rank)) : 0;
        cell.style.background = `hsl(${(hue * 137.5) % 360} 65% 78%)`;
        grid.append(cell);
      }
    }
    const listed = [...groups.values()]
      .slice(0, 4)
      .map((each) => `{${each.slice(0, 8).join(", ")}${each.length > 8 || total > most ? ", …" : ""}}`);
    const many = total / c.group_size;
    return [
      el(
        "p",
        {},
        `${count(many, "group")} of ${c.group_size}, each by itself: ${listed.join(" ")}${many > 4 ? " …" : ""}`,
      ),
      grid,
      ...(rows > shownRows || columns > shownColumns
        ? [
            el(
              "p",
              { class: "soft" },
              `The first ${shownRows} by ${shownColumns} of ${rows.toLocaleString("en")} by ${columns.toLocaleString("en")} devices. A colour is a group.`,
            ),
          ]
        : [el("p", { class: "soft" }, "A colour is a group.")]),
    ];
  }

  function panel() {
    const at = $("#selected");
    const content = !chosen
      ? aboutGroup(0)
      : chosen.edge
        ? aboutCollective(chosen.edge)
        : chosen.node[0] === "g"
          ? aboutGroup(Number(chosen.node.slice(1)))
          : Number(chosen.node.slice(1)) < current.firstInput
            ? aboutOperator(Number(chosen.node.slice(1)))
            : aboutTensor(Number(chosen.node.slice(1)));
    at.replaceChildren(...content);
    at.scrollTop = 0;
  }

  async function select(what, show = false) {
    chosen = what;
    panel();
    const title = !what
      ? "nothing"
      : what.edge
        ? `collective ${current.plan.collectives[what.edge[0]].kind}`
        : current.title(what.node);
    $("#said").textContent = `Selected: ${title}`;
    if (show && what?.node) await reveal(what.node);
    if (show && what?.edge) {
      const crossing = current.facts.crossings[what.edge[0]];
      const to = crossing ? crossing[1] : current.names.get(current.plan.collectives[what.edge[0]].where);
      if (to !== undefined) await reveal(`n${to}`);
    }
    mark();
    for (const item of $$("[role=treeitem]", $("#tree")))
      item.setAttribute("aria-selected", String(item.dataset.id === chosen?.node));
  }

  // -- The tree beside the graph, which is also what a screen reader reads

  function tree() {
    const focused = document.activeElement?.dataset?.id;
    const item = (id, level) => {
      const group = id[0] === "g";
      const isOpen = current.open.has(id);
      const text = el(
        "span",
        {},
        el("span", { class: "twist", "aria-hidden": "true" }, group ? (isOpen ? "▾" : "▸") : ""),
        current.label(id),
      );
      const node = el(
        "li",
        {
          role: "treeitem",
          "aria-level": level,
          tabindex: "-1",
          "data-id": id,
          "aria-selected": String(chosen?.node === id),
          ...(group ? { "aria-expanded": String(isOpen) } : {}),
        },
        text,
      );
      text.addEventListener("click", (event) => {
        if (group && event.target.classList.contains("twist")) fold(id);
        else select({ node: id }, true);
      });
      text.addEventListener("dblclick", () => fold(id));
      if (group && isOpen)
        node.append(
          el("ul", { role: "group" }, ...current.groups[id.slice(1)].children.map((child) => item(child, level + 1))),
        );
      return node;
    };
    $("#tree").replaceChildren(
      el("ul", { role: "group" }, ...current.groups[0].children.map((child) => item(child, 1))),
    );
    const items = $$("[role=treeitem]", $("#tree"));
    const at = items.find((each) => each.dataset.id === focused) || items[0];
    if (at) at.tabIndex = 0;
    if (focused && at) at.focus();
  }

  $("#tree").addEventListener("keydown", (event) => {
    const at = event.target.closest("[role=treeitem]");
    if (!at) return;
    const items = $$("[role=treeitem]", $("#tree"));
    const move = (to) => {
      if (to) {
        for (const each of items) each.tabIndex = -1;
        to.tabIndex = 0;
        to.focus();
      }
    };
    const [i, id] = [items.indexOf(at), at.dataset.id];
    const isOpen = current.open.has(id);
    const actions = {
      ArrowDown: () => move(items[i + 1]),
      ArrowUp: () => move(items[i - 1]),
      Home: () => move(items[0]),
      End: () => move(items[items.length - 1]),
      ArrowRight: () => (id[0] === "g" && !isOpen ? fold(id) : move(items[i + 1])),
      ArrowLeft: () => (id[0] === "g" && isOpen ? fold(id) : move(at.parentElement.closest("[role=treeitem]"))),
      Enter: () => select({ node: id }, true),
      " ": () => select({ node: id }, true),
    };
    if (actions[event.key]) {
      event.preventDefault();
      event.stopPropagation();
      actions[event.key]();
    }
  });

  // -- Search

  let hits = [];
  let hit = 0;
  function showHits() {
    $("#found").replaceChildren(
      ...hits.slice(0, 60).map((each, i) =>
        el(
          "li",
          {
            role: "option",
            id: `hit${i}`,
            "aria-selected": String(i === hit),
            onmousedown: (event) => {
              event.preventDefault();
              take(i);
            },
          },
          each.text,
        ),
      ),
    );
    $("#search").setAttribute("aria-expanded", String(hits.length > 0));
    if (hits.length) $("#search").setAttribute("aria-activedescendant", `hit${hit}`);
    else $("#search").removeAttribute("aria-activedescendant");
  }
  function take(i) {
    const found = hits[i];
    hits = [];
    showHits();
    if (found) select({ node: found.id }, true);
  }
  $("#search").addEventListener("input", (event) => {
    const text = event.target.value.trim().toLowerCase();
    hits = [];
    hit = 0;
    if (text) {
      const p = current;
      const consider = (id, name, more) => {
        if (hits.length < 400 && `${name} ${more}`.toLowerCase().includes(text))
          hits.push({
            id,
            text: more ? `${name}  ${more}` : name,
            rank: name.toLowerCase() === text ? 0 : name.toLowerCase().includes(text) ? 1 : 2,
          });
      };
      p.groups.forEach(
        (group, i) => group.name && consider(`g${i}`, group.name, group.kind === "module" ? "" : group.kind),
      );
      p.plan.inputs.forEach((t, i) => consider(`n${p.firstInput + i}`, t.name, t.role));
      p.plan.outputs.forEach((t, i) => consider(`n${p.firstOutput + i}`, t.name, "output"));
      p.ops.forEach((o, i) => consider(`n${i}`, o.name, `${o.operator} ${o.module}`));
      hits.sort((a, b) => a.rank - b.rank);
      $("#said").textContent = hits.length ? `${count(hits.length, "result")}` : "nothing is called that";
    }
    showHits();
  });
  $("#search").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") hit = Math.min(hit + 1, Math.min(hits.length, 60) - 1);
    else if (event.key === "ArrowUp") hit = Math.max(0, hit - 1);
    else if (event.key === "Enter") take(hit);
    else if (event.key === "Escape") {
      hits = [];
      showHits();
      $("#cy").focus();
    } else return;
    event.preventDefault();
    showHits();
    $(`#hit${hit}`)?.scrollIntoView({ block: "nearest" });
  });
  $("#search").addEventListener("blur", () => {
    hits = [];
    showHits();
  });

  // -- Buttons, the keyboard, and other parts of the page

  function zoom(by) {
    cy.zoom({ level: cy.zoom() * by, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  }
  const actions = {
    fit: () => cy.fit(undefined, 24),
    in: () => zoom(1.3),
    out: () => zoom(1 / 1.3),
    fold: async () => {
      current.open = new Set(["g0"]);
      tree();
      await draw();
    },
    first: async () => {
      current.open = new Set(["g0"]);
      current.unfoldAtFirst();
      tree();
      await draw();
    },
  };
  for (const button of $$("[data-do]")) button.addEventListener("click", () => actions[button.dataset.do]());
  $("#weights").addEventListener("change", (event) => {
    withWeights = event.target.checked;
    draw();
  });
  // of which plan a button is: that of its section or, in one of both, the one that is shown
  const sideOf = (button) => Number(button.closest("[data-plan]")?.dataset.plan ?? plans.indexOf(current));
  for (const button of $$("[data-collective]")) {
    button.addEventListener("click", async () => {
      await switchTo(sideOf(button));
      await select({ edge: JSON.parse(button.dataset.collective) }, true);
      $("#graph").scrollIntoView();
    });
  }
  for (const button of $$("[data-find]")) {
    button.addEventListener("click", async () => {
      await switchTo(sideOf(button));
      const id = current.inputs.get(button.dataset.find) ?? current.names.get(button.dataset.find);
      const group = current.groups.findIndex((each) => each.name === button.dataset.find);
      if (id !== undefined) await select({ node: `n${id}` }, true);
      else if (group >= 0) await select({ node: `g${group}` }, true);
      $("#graph").scrollIntoView();
    });
  }
  async function switchTo(side) {
    if (current === plans[side]) return;
    current = plans[side];
    chosen = null;
    for (const each of $$("[data-plan]")) each.hidden = Number(each.dataset.plan) !== side;
    for (const each of $$("input[name=plan]")) each.checked = Number(each.value) === side;
    tree();
    await draw();
    panel();
  }
  for (const input of $$("input[name=plan]")) input.addEventListener("change", () => switchTo(Number(input.value)));

  cy = cytoscape({
    container: $("#cy"),
    style: style(),
    minZoom: 0.03,
    maxZoom: 3,
    boxSelectionEnabled: false,
    selectionType: "single",
  });
  dark.addEventListener("change", () => {
    cy.style(style());
    draw();
  });
  cy.on("tap", "node", ({ target }) => select({ node: target.id() }));
  cy.on("dbltap", "node", ({ target }) => fold(target.id()));
  cy.on("tap", "edge", ({ target }) => {
    const here = target.data("collectives");
    if (here.length) select({ edge: here });
    else select({ node: target.source().id() });
  });
  cy.on("tap", (event) => {
    if (event.target === cy) select(null);
  });

  function neighbour(key) {
    const at = chosen?.node ? cy.getElementById(current.seen(chosen.node)) : cy.collection();
    if (at.empty())
      return cy
        .nodes()
        .filter((each) => !each.isParent())
        .sort((a, b) => a.position().y - b.position().y)[0];
    const nearest = (nodes) =>
      nodes.sort((a, b) => Math.abs(a.position().x - at.position().x) - Math.abs(b.position().x - at.position().x))[0];
    if (key === "ArrowDown") return nearest(at.outgoers("node"));
    if (key === "ArrowUp") return nearest(at.incomers("node"));
    const side = key === "ArrowLeft" ? -1 : 1;
    const beside = cy
      .nodes()
      .filter(
        (each) =>
          !each.isParent() &&
          Math.abs(each.position().y - at.position().y) < 20 &&
          side * (each.position().x - at.position().x) > 1,
      );
    return nearest(beside);
  }
  $("#cy").addEventListener("keydown", (event) => {
    const { key } = event;
    if (key.startsWith("Arrow") && event.shiftKey)
      cy.panBy({ x: { ArrowLeft: 60, ArrowRight: -60 }[key] || 0, y: { ArrowUp: 60, ArrowDown: -60 }[key] || 0 });
    else if (key.startsWith("Arrow")) {
      const to = neighbour(key);
      if (to) {
        select({ node: to.id() });
        cy.center(to);
      }
    } else if (key === "Enter" || key === " ") {
      if (chosen?.node) fold(chosen.node);
    } else if (key === "+" || key === "=") zoom(1.3);
    else if (key === "-") zoom(1 / 1.3);
    else if (key === "0") cy.fit(undefined, 24);
    else if (key === "Escape") select(null);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
      event.preventDefault();
      $("#search").focus();
    }
  });

  for (const each of $$("[data-plan]")) each.hidden = each.dataset.plan !== "0";
  if (current.facts.graph) $("#why").textContent = current.facts.graph;
  await pause();
  tree();
  panel();
  await pause();
  await draw();
  window.partway = {
    graph: cy,
    select: (name) => {
      const id = current.names.get(name) ?? current.inputs.get(name);
      return select({ node: `n${id}` }, true);
    },
  };
  performance.mark("interactive");
  document.documentElement.dataset.ready = "true";
})().catch((error) => {
  document.querySelector("#said").textContent = `The graph cannot be drawn: ${error.message}`;
  document.querySelector("#said").className = "warn";
  throw error;
});
