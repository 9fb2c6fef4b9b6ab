// Making and changing elements. Text always goes in as text: nothing here, or anywhere else on the page, parses
// HTML, so that a partition named <script> is shown as one.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  const text = value === null || value === undefined ? null : String(value);
  if (text === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export const byId = (id) => document.getElementById(id);

// A row of buttons of which one is pressed.
export function segments(box, choices, chosen, onChoose) {
  const press = (value) => {
    for (const button of box.children) {
      setAttribute(button, "aria-pressed", button.dataset.value === value);
    }
  };
  box.replaceChildren(
    ...choices.map(([value, title]) =>
      el("button", { type: "button", "data-value": value, onclick: () => { press(value); onChoose(value); } }, title)),
  );
  press(chosen);
}

// A select whose options follow the data, and which keeps what was chosen.
export function setOptions(select, values, titles = values) {
  const same = select.options.length === values.length
    && values.every((value, at) => select.options[at].value === value && select.options[at].text === titles[at]);
  if (same) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((value, at) => el("option", { value }, titles[at])));
  if (values.includes(chosen)) select.value = chosen;
}
