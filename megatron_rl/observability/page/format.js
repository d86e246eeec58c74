"use strict";
// Makes nodes, and writes numbers, times and texts for people. What a run wrote is put in place as text, never as HTML.

const at = (id) => document.getElementById(id);

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// "–", "1234", "0.05", "1.20e-5", "3.20M"
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return size < 1e4 ? String(value) : value.toLocaleString("en-US");
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// Of an axis: "15k", "0.05", "1e-5".
function tickText(value) {
  for (const [size, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${suffix}`;
  }
  return value !== 0 && Math.abs(value) < 1e-3 ? String(Number(value.toPrecision(4)).toExponential()) : String(Number(value.toPrecision(4)));
}

const percent = (value, digits) => `${(100 * value).toFixed(digits)} %`;

// "4.2 s", "3 min 05 s", "2 h 07 min"
function duration(seconds) {
  if (seconds < 59.5) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// "14:05", or with its day if that is not today
function when(seconds) {
  const time = new Date(1000 * seconds), clock = time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  return time.toDateString() === new Date().toDateString() ? clock : `${time.toLocaleDateString()} ${clock}`;
}

// Control, format and private characters could reverse a line or pass for another: they are shown as escapes.
const visible = (text) => text.replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
