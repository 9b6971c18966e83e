// Labels of one figure that lie over each other: more than a tenth of the smaller one is covered.
const found = [];
for (const figure of document.querySelectorAll(".figure svg")) {
  const texts = [...figure.querySelectorAll("text")].filter((text) => text.textContent.trim())
    .map((text) => [text.textContent.trim(), text.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  for (const [place, [name, a]] of texts.entries()) {
    for (const [other, b] of texts.slice(place + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const least = Math.min(a.width * a.height, b.width * b.height);
      // a line of text is taller than its letters: only what covers letters counts
      if (wide > 1 && high > 0.35 * Math.min(a.height, b.height) && wide * high > 0.1 * least) {
        found.push(`labels overlap: ${name} | ${other}`);
      }
    }
  }
}
return found;
