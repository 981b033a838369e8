// Makes elements. Every text goes in as a text node; nothing here, or elsewhere, parses HTML.

export const at = (id) => document.getElementById(id);

// Return an element with these properties and children; a child is a node or a text.
export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function notice(text) {
  at("notice").textContent = text;
}
