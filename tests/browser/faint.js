// Text whose contrast with what is behind it is under 4.5 (WCAG AA), but for tooltips (an SVG title is not drawn); figures' marks are tested with their colours.
const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgb = (colour) => { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); return [...paint.getImageData(0, 0, 1, 1).data]; };
const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\)$|transparent/.test(colour)) return rgb(colour);
  }
  return [255, 255, 255];
};
const found = new Set();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || ["SCRIPT", "STYLE", "OPTION", "TITLE"].includes(element.tagName.toUpperCase())) continue;
  const style = getComputedStyle(element);
  const ink = element.closest("svg") ? style.fill : style.color;
  const [high, low] = [luminance(rgb(ink)), luminance(behind(element))].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  if (ratio < 4.5) found.add(`${ratio.toFixed(2)} ${element.tagName}.${element.className}: ${element.textContent.trim().slice(0, 30)}`);
}
return [...found];
