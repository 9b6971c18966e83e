// Search over the report. The index is a script beside the page, loaded when the field is first used.
"use strict";
(() => {
  const form = document.getElementById("search"), field = form.elements.words;
  const results = document.getElementById("search-results"), said = document.getElementById("search-said");
  const MOST = 20, AROUND = 70;
  let loading;

  function load() {
    loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = "search-index.js";
      script.onload = resolve;
      script.onerror = reject;
      document.head.append(script);
    });
    return loading;
  }

  // Every word must stand in the page's title, the heading or the text; a hit in the heading or title counts more.
  function find(words) {
    const found = [];
    for (const page of globalThis.steptimeIndex) {
      const title = page.title.toLowerCase();
      for (const [id, heading, text] of page.sections) {
        const head = heading.toLowerCase(), body = text.toLowerCase();
        let score = 0;
        for (const word of words) {
          const of = 8 * head.includes(word) + 3 * (head !== title && title.includes(word)) + body.includes(word);
          if (!of) { score = 0; break; }
          score += of;
        }
        if (score) found.push({page, id, heading, text, score});
      }
    }
    return found.sort((a, b) => b.score - a.score);
  }

  function excerpt(text, words) {
    const lower = text.toLowerCase(), places = words.map((word) => lower.indexOf(word)).filter((place) => place >= 0);
    const from = places.length ? Math.max(0, Math.min(...places) - AROUND) : 0;
    const cut = text.slice(from, from + 2 * AROUND);
    return `${from ? "… " : ""}${cut}${from + cut.length < text.length ? " …" : ""}`;
  }

  // The text with the words marked; textContent, so that nothing of it is taken for markup.
  function marked(element, text, words) {
    const lower = text.toLowerCase();
    let at = 0;
    while (at < text.length) {
      const hits = words.map((word) => [lower.indexOf(word, at), word.length]).filter(([place]) => place >= 0);
      if (!hits.length) break;
      const [place, length] = hits.sort((a, b) => a[0] - b[0] || b[1] - a[1])[0];
      const mark = document.createElement("mark");
      mark.textContent = text.slice(place, place + length);
      element.append(text.slice(at, place), mark);
      at = place + length;
    }
    element.append(text.slice(at));
    return element;
  }

  function item({page, id, heading, text}, words) {
    const link = document.createElement("a"), entry = document.createElement("li");
    link.href = page.href + (id ? `#${id}` : "");
    link.append(marked(document.createElement("strong"), heading, words));
    if (heading !== page.title) link.append(Object.assign(document.createElement("span"), {textContent: page.title}));
    link.append(marked(document.createElement("small"), excerpt(text, words), words));
    entry.append(link);
    return entry;
  }

  function close() {
    results.hidden = true;
    results.replaceChildren();
    said.textContent = "";
  }

  async function show() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return close();
    try {
      await load();
    } catch {
      said.textContent = "search-index.js is missing beside this page";
      return;
    }
    if (field.value.toLowerCase().split(/\s+/).filter(Boolean).join(" ") !== words.join(" ")) return;
    const found = find(words);
    results.replaceChildren(...found.slice(0, MOST).map((hit) => item(hit, words)));
    results.hidden = !found.length;
    said.textContent = found.length > MOST ? `The best ${MOST} of ${found.length} places` : `${found.length || "No"} place${found.length === 1 ? "" : "s"}`;
  }

  function move(event) {
    const links = [...results.querySelectorAll("a")], place = links.indexOf(document.activeElement);
    if (event.key === "Escape") { close(); field.focus(); }
    else if (event.key === "ArrowDown" && links.length) links[Math.min(place + 1, links.length - 1)].focus();
    else if (event.key === "ArrowUp" && place >= 0) (links[place - 1] || field).focus();
    else return;
    event.preventDefault();
  }

  field.addEventListener("focus", () => load().catch(() => {}));
  field.addEventListener("input", show);
  form.addEventListener("keydown", move);
  form.addEventListener("submit", (event) => { event.preventDefault(); results.querySelector("a")?.click(); });
  form.addEventListener("focusout", (event) => { if (!form.contains(event.relatedTarget) && event.relatedTarget) close(); });
  results.addEventListener("click", (event) => { if (event.target.closest("a")) close(); });
  document.addEventListener("pointerdown", (event) => { if (!form.contains(event.target)) close(); });
  form.hidden = false;
})();
