// Elements that stick out of the window without a box of their own that scrolls, and elements whose text is cut off
// (a field scrolls with its cursor).
const width = document.documentElement.clientWidth, found = [];
const scrolls = (element) => {
  for (let e = element; e && e !== document.body; e = e.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
  return false;
};
if (document.documentElement.scrollWidth > width) found.push(`document is ${document.documentElement.scrollWidth} wide`);
for (const element of document.querySelectorAll("body *")) {
  const box = element.getBoundingClientRect(), style = getComputedStyle(element);
  if (!box.width || !box.height || element.closest("thead, .skip") || style.visibility === "hidden") continue;
  const name = `${element.tagName}.${element.className.baseVal ?? element.className}: ${element.textContent.trim().slice(0, 40)}`;
  if ((box.right > width + 1 || box.left < -1) && !scrolls(element)) found.push(`sticks out: ${name}`);
  if (element.tagName !== "INPUT" && ["hidden", "clip"].includes(style.overflowX) && element.scrollWidth > element.clientWidth + 1) found.push(`cut off: ${name}`);
}
for (const text of document.querySelectorAll("svg text")) {
  const box = text.getBoundingClientRect(), figure = text.closest("svg").getBoundingClientRect();
  if (box.left < figure.left - 2 || box.right > figure.right + 2) found.push(`outside its figure: ${text.textContent}`);
}
return found;
