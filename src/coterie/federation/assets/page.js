"use strict";

// Everything that is shown goes through textContent: names and reasons may be other parties' words.
const EVERY = 2000;
const at = (id) => document.getElementById(id);

function element(kind, text, name) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function ago(seconds) {
  if (seconds === null) return "never";
  const gone = Math.max(0, Date.now() / 1000 - seconds);
  for (const [length, word] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (gone >= length) return `${Math.floor(gone / length)} ${word} ago`;
  }
  return `${Math.floor(gone)} s ago`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (count >= 1000 && place < units.length - 1) { count /= 1000; place += 1; }
  return `${place ? count.toFixed(1) : count} ${units[place]}`;
}

function member(found) {
  const row = element("tr");
  row.append(element("td", found.name), element("td", found.status, found.status === "online" ? "online" : "away"));
  row.append(element("td", ago(found.last_seen)));
  return row;
}

function run(found) {
  const part = element("section");
  part.id = `run-${found.name}`;
  part.append(element("h3", `${found.name}: ${found.title}`));
  const bar = element("progress");
  bar.max = found.planned;
  bar.value = found.rounds;
  bar.setAttribute("aria-label", `round ${found.rounds} of ${found.planned}`);
  const facts = [`round ${found.rounds} of ${found.planned}`, found.finished ? "finished" : "not finished"];
  if (found.replies !== null) facts.push(`${found.replies} nodes replied`);
  if (found.seconds !== null) facts.push(`${found.seconds.toFixed(1)} s a round`);
  facts.push(`${bytes(found.bytes_down)} down`, `${bytes(found.bytes_up)} up`);
  if (found.epsilon !== null) facts.push(`ε ${found.epsilon.toPrecision(4)}`);
  for (const [name, value] of Object.entries(found.scores)) facts.push(`${name} ${value.toFixed(4)}`);
  const events = element("ul", undefined, "events");
  for (const sentence of found.events) events.append(element("li", sentence));
  part.append(bar, element("p", facts.join(" · "), "facts"), events);
  return part;
}

function show(found) {
  document.title = `${found.name} · federation`;
  at("name").textContent = found.name;
  at("server").textContent = found.server_answers ? "the server answers" : "the server is not running";
  at("server").className = found.server_answers ? "online" : "offline";
  at("members").replaceChildren(...found.members.map(member));
  at("runs").replaceChildren(...found.runs.slice().reverse().map(run));
  at("no-runs").hidden = found.runs.length > 0;
}

async function look() {
  try {
    const answer = await fetch("/status.json", { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    show(await answer.json());
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    at("server").textContent = `no news: ${error.message}`;
    at("server").className = "stale";
  }
  setTimeout(look, EVERY);
}

look();
