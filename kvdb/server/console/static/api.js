// Calls of the server, with the token if it asks for one.

const KEY = "kvdb-token";
const WAIT_MS = 15000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setToken = (token) => (token ? sessionStorage.setItem(KEY, token) : sessionStorage.removeItem(KEY));
export const hasToken = () => sessionStorage.getItem(KEY) !== null;

// The answer to a call. Throws Refused with the server's words, and with status 0 where there is no answer.
export async function call(name, query = {}) {
  const token = sessionStorage.getItem(KEY);
  const given = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  let answer, told;
  try {
    answer = await fetch(`api/${name}?${given}`, {
      headers: token === null ? {} : { Authorization: `Bearer ${token}` },
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(WAIT_MS),
    });
    told = await answer.json();
  } catch {
    throw new Refused(answer?.status ?? 0, "The server does not answer.");
  }
  if (!answer.ok) throw new Refused(answer.status, told.error);
  return told;
}
