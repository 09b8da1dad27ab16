// Zooming, moving and choosing in the graphs of one page, and what a chart says under the pointer.
// The page is whole without it.
(function (root) {
  "use strict";
  if (!root || root.dataset.live) return;
  root.dataset.live = "1";
  root.classList.add("live");
  const all = (selector, within) => [...(within || root).querySelectorAll(selector)];

  for (const box of all(".graph-box")) {
    const svg = box.querySelector("svg.graph");
    const width = Number(svg.getAttribute("width"));
    const height = Number(svg.getAttribute("height"));
    const panel = box.closest(".work").querySelector(".panel");
    const steps = panel ? all("details", panel) : [];
    const links = all("a.box", svg);
    const view = { x: 0, y: 0, scale: 1 };

    const show = () => {
      const w = box.clientWidth / view.scale, h = box.clientHeight / view.scale;
      // Some of the drawing is always to be seen.
      view.x = Math.min(Math.max(view.x, 40 - w), width - 40);
      view.y = Math.min(Math.max(view.y, 40 - h), height - 40);
      svg.setAttribute("viewBox", `${view.x} ${view.y} ${w} ${h}`);
      svg.dataset.scale = view.scale;
    };
    const widest = Math.max(0, ...all("a.box .shape", svg).map((shape) => shape.getBBox().width));
    const fit = (least) => {
      box.style.height = "";
      const room = box.clientWidth;
      // On a phone, the widest box sets how far the drawing shrinks; a hidden page has no room.
      view.scale = Math.max(Math.min(1, room / width), Math.min(least, room / (widest + 16)), 0.3);
      box.style.height = `${Math.max(180, Math.min(height * view.scale, innerHeight * 0.78))}px`;
      view.x = width / 2 - room / view.scale / 2;
      if (room < width * view.scale) view.x = start(room / view.scale);
      view.y = 0;
      show();
    };
    // Where all does not fit, it begins at the first box.
    const start = (w) => {
      const first = links[0] && links[0].querySelector(".shape");
      if (!first) return 0;
      const middle = Number(first.getAttribute("x")) + Number(first.getAttribute("width")) / 2;
      return Math.min(Math.max(middle - w / 2, 0), width - w);
    };
    const whole = () => {
      view.scale = Math.min(1.5, box.clientWidth / width, box.clientHeight / height);
      view.x = width / 2 - box.clientWidth / view.scale / 2;
      view.y = height / 2 - box.clientHeight / view.scale / 2;
      show();
    };
    const zoom = (factor, at) => {
      const bounds = box.getBoundingClientRect();
      const px = at ? at.clientX - bounds.left : box.clientWidth / 2;
      const py = at ? at.clientY - bounds.top : box.clientHeight / 2;
      const scale = Math.min(Math.max(view.scale * factor, 0.08), 6);
      view.x += px / view.scale - px / scale;
      view.y += py / view.scale - py / scale;
      view.scale = scale;
      show();
    };
    const into = (link) => {
      const shape = link.querySelector(".shape");
      const [x, y, w] = ["x", "y", "width"].map((name) => Number(shape.getAttribute(name)));
      const vw = box.clientWidth / view.scale, vh = box.clientHeight / view.scale;
      const inside = x >= view.x && x + w <= view.x + vw && y >= view.y && y + 40 <= view.y + vh;
      if (inside) return;
      view.x = x + w / 2 - vw / 2;
      view.y = y - vh / 3;
      show();
    };
    const choose = (link, fromPanel) => {
      const before = svg.querySelector("a[aria-current]");
      const names = link && link !== before ? link.dataset.names.split("\n") : [];
      links.forEach((other) => other.removeAttribute("aria-current"));
      svg.classList.toggle("choosing", names.length > 0);
      all(".edge", svg).forEach((edge) => {
        const ends = edge.dataset.ends.split("\n");
        edge.classList.toggle("near", ends.includes(link && names.length ? link.dataset.key : ""));
      });
      steps.forEach((step) => step.classList.remove("chosen"));
      if (!names.length) return;
      link.setAttribute("aria-current", "true");
      into(link);
      const step = steps.find((other) => other.id === link.dataset.target);
      if (!step) return;
      step.classList.add("chosen");
      if (fromPanel) return;
      steps.forEach((other) => { other.open = other === step; });
      const scrolls = panel.scrollHeight > panel.clientHeight + 1;
      if (scrolls) panel.scrollTop += step.getBoundingClientRect().top - panel.getBoundingClientRect().top - 4;
    };

    let moved = false;
    const pointers = new Map();
    const apart = () => {
      const [a, b] = [...pointers.values()];
      return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
    };
    box.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      pointers.set(event.pointerId, event);
      moved = false;
    });
    box.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const dx = event.clientX - before.clientX, dy = event.clientY - before.clientY;
      if (!moved && Math.hypot(dx, dy) < 4) return;
      if (!moved) box.setPointerCapture(event.pointerId);
      moved = true;
      box.classList.add("moving");
      if (pointers.size === 2) {
        const was = apart();
        pointers.set(event.pointerId, event);
        const [a, b] = [...pointers.values()];
        zoom(apart() / was, { clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2 });
        return;
      }
      pointers.set(event.pointerId, event);
      view.x -= dx / view.scale;
      view.y -= dy / view.scale;
      show();
    });
    const up = (event) => {
      pointers.delete(event.pointerId);
      box.classList.remove("moving");
    };
    box.addEventListener("pointerup", up);
    box.addEventListener("pointercancel", up);
    box.addEventListener("dragstart", (event) => event.preventDefault());
    box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0025)), event);
    }, { passive: false });
    box.addEventListener("dblclick", (event) => {
      if (!event.target.closest("a")) zoom(1.6, event);
    });
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const step = 60 / view.scale;
      const keys = {
        "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), "0": whole,
        ArrowLeft: () => { view.x -= step; show(); }, ArrowRight: () => { view.x += step; show(); },
        ArrowUp: () => { view.y -= step; show(); }, ArrowDown: () => { view.y += step; show(); },
        Escape: () => choose(null),
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    svg.addEventListener("click", (event) => {
      const link = event.target.closest("a.box");
      if (link || moved) event.preventDefault();
      if (moved) { moved = false; return; }
      choose(link);
    });
    links.forEach((link) => link.addEventListener("focus", () => {
      if (link.matches(":focus-visible")) into(link);
    }));
    steps.forEach((step) => step.querySelector("summary").addEventListener("click", () => {
      const link = links.find((other) => other.dataset.target === step.id);
      if (link && !step.open && !link.hasAttribute("aria-current")) choose(link, true);
    }));

    const tools = document.createElement("div");
    tools.className = "tools";
    tools.setAttribute("role", "group");
    tools.setAttribute("aria-label", "Zoom");
    const buttons = [
      ["+", "zoom in", () => zoom(1.25)], ["−", "zoom out", () => zoom(0.8)],
      ["fit", "show all of it", whole], ["1:1", "letters in their own size", () => fit(1)],
    ];
    for (const [text, title, action] of buttons) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.title = title;
      button.setAttribute("aria-label", title);
      button.addEventListener("click", action);
      tools.append(button);
    }
    box.closest("section").querySelector(".bar").append(tools);
    box.tabIndex = 0;
    fit(0.62);
    let before = box.clientWidth;
    if (window.ResizeObserver) {
      new ResizeObserver(() => {
        if (Math.abs(box.clientWidth - before) < 2) return;
        before = box.clientWidth;
        fit(0.62);
      }).observe(box);
    }
    addEventListener("beforeprint", () => svg.setAttribute("viewBox", `0 0 ${width} ${height}`));
    addEventListener("afterprint", show);
  }

  for (const chart of all(".chart")) {
    const readout = chart.querySelector(".readout");
    if (!readout) continue;
    const before = readout.textContent;
    chart.addEventListener("pointerover", (event) => {
      const title = event.target.closest(".strip")?.querySelector("title");
      readout.textContent = title ? title.textContent : before;
    });
    chart.addEventListener("pointerleave", () => { readout.textContent = before; });
  }
})
