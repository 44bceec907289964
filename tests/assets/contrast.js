// For every element with text of its own: the contrast of text and background, after WCAG 2.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, bottom) => [0, 1, 2].map((i) => top[i] * top[3] + bottom[i] * (1 - top[3])).concat(1);
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const light = (color) => {
    const [r, g, b] = color.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = [...document.querySelectorAll("body *")].filter((e) => {
    return !e.disabled && e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  });
  return texts.map((e) => {
    const paper = behind(e);
    const style = getComputedStyle(e);
    const ink = over(rgba(e instanceof SVGElement ? style.fill : style.color), paper);
    const [low, high] = [light(ink), light(paper)].sort((a, b) => a - b);
    return { text: e.textContent.trim().slice(0, 30), ratio: (high + 0.05) / (low + 0.05) };
  });
}
