// Numbers in base units, as text for people.

const whole = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const count = (value) => whole.format(Math.round(value));

export function bytes(value) {
  let step = 0;
  while (value >= 1024 && step < UNITS.length - 1) [value, step] = [value / 1024, step + 1];
  return `${step ? digits(value) : Math.round(value)} ${UNITS[step]}`;
}

export function seconds(value) {
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value >= 1) return `${digits(value)} s`;
  return value >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

export function share(value) {
  if (value === null || value === undefined) return "–";
  const percent = value * 100;
  return percent === 0 || percent >= 9.95 ? `${Math.round(percent)} %` : `${Number(percent.toPrecision(2))} %`;
}

// How long something has been, of whole units.
export function age(epoch) {
  const past = Math.max(0, Date.now() / 1000 - epoch);
  if (past < 60) return `${Math.floor(past)} s`;
  if (past < 3600) return `${Math.floor(past / 60)} min`;
  if (past < 86400) return `${Math.floor(past / 3600)} h`;
  return `${Math.floor(past / 86400)} d`;
}

export const ago = (epoch) => (Date.now() / 1000 - epoch < 5 ? "now" : `${age(epoch)} ago`);

// Of what happens in a second.
export const rate = (value) => (value && value < 100 ? digits(value) : count(value));

export const date = (epoch) => new Date(epoch * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

const digits = (value) => (value >= 100 ? count(value) : value.toPrecision(value >= 10 ? 3 : 2));
