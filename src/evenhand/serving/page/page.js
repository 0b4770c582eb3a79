// Asks every shown run as one types, and shows their answers side by side.

const NUM_RESULTS = 10;
const WAIT = 80; // ms without a key before the server is asked
const $ = (id) => document.getElementById(id);
let runs = [], shown = [], example = null, latest = 0, timer = 0;
let key = sessionStorage.getItem("evenhand-key") ?? "";

function make(tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text ?? ""; // never innerHTML: labels come from data
  return element;
}

async function call(path, body) {
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Error("the server does not answer");
  }
  const needsKey = answer.status === 401;
  $("key-form").hidden = !needsKey;
  if (needsKey) {
    $("key").focus();
    throw new Error(key && "The server does not know this key.");
  }
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.detail);
  return value;
}

// --- asking ---------------------------------------------------------------------------------------

async function ask() {
  const mine = ++latest; // an answer that comes after a later one was asked for is dropped
  const query = $("query").value;
  history.replaceState(null, "", query ? `#${encodeURIComponent(query)}` : location.pathname);
  if (example?.query !== query) example = null;
  for (const button of document.querySelectorAll("#examples button"))
    button.setAttribute("aria-pressed", String(button.textContent === query));
  try {
    const lists = query.trim()
      ? await Promise.all(shown.map(async (run) =>
          (await call("search", { queries: [query], num_results: NUM_RESULTS, run: run.name, explain: true })).results[0]))
      : shown.map(() => []);
    if (mine === latest) show(query, lists);
  } catch (error) {
    if (mine === latest) $("alert").textContent = error.message;
  }
}

function show(query, lists) {
  $("alert").textContent = "";
  [...$("columns").children].forEach((section, at) => fill(section, shown[at], lists[at], lists[1 - at], query));
  const words = shown.map((run, at) => `${run.name}: ${lists[at][0]?.label ?? "nothing"}`);
  $("status").textContent = query.trim() ? `First answers. ${words.join("; ")}` : "";
}

function fill(section, run, answers, others, query) {
  const best = answers[0]?.score ?? 1, isAsked = query.trim() !== "";
  const elsewhere = others && new Set(others.map((answer) => answer.id));
  section.querySelector("ol").replaceChildren(...answers.map((answer, at) => {
    const item = make("li", "answer"), label = make("span", "label");
    label.append(make("bdi", "", answer.label));
    if (elsewhere && !elsewhere.has(answer.id)) label.append(" ", make("span", "only", "only here"));
    item.classList.toggle("right", answer.id === example?.label_id);
    const bar = make("progress", "bar");
    bar.max = 1; // of the best score of the list
    bar.value = best > 0 ? Math.max(0, answer.score / best) : 0;
    bar.setAttribute("aria-hidden", "true");
    const ngrams = make("span", "ngrams");
    ngrams.append(make("span", "hidden", answer.matched.length ? "Matched: " : ""));
    for (const { ngram, score } of answer.matched) {
      const chip = make("bdi", "", ngram.replaceAll(" ", "\u2423")); // a space that is seen
      chip.title = `adds ${score.toFixed(3)} to the score`;
      ngrams.append(chip, " ");
    }
    item.append(make("span", "rank", `${at + 1}`), label, make("span", "score", answer.score.toFixed(3)), bar, ngrams);
    return item;
  }));
  if (!answers.length) section.querySelector("ol").append(make("li", "empty", isAsked ? "Nothing found." : "Answers appear here."));
  const verdict = section.querySelector(".verdict");
  const rank = answers.findIndex((answer) => answer.id === example?.label_id) + 1;
  verdict.hidden = !example || !answers.length;
  verdict.className = `verdict ${rank === 1 ? "good" : rank ? "" : "bad"}`;
  if (example) verdict.textContent = rank ? `${example.label}: number ${rank}` : `${example.label}: not among the first ${answers.length}`;
  draw(section.querySelector(".map"), run, answers);
}

// --- the map --------------------------------------------------------------------------------------

const worlds = new Map(); // by the fingerprint of the data, which runs of one data set share

async function load(run) {
  if (!run.has_map || worlds.has(run.fingerprint)) return;
  worlds.set(run.fingerprint, null); // it is on its way
  const world = await call(`runs/${encodeURIComponent(run.name)}/map`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.id = `world-${run.fingerprint}`;
  path.setAttribute("d", world.path);
  $("worlds").append(path);
  worlds.set(run.fingerprint, world);
}

function draw(map, run, answers) {
  const world = worlds.get(run.fingerprint);
  map.toggleAttribute("hidden", !world);
  if (!world) return;
  map.setAttribute("viewBox", `0 0 ${world.width} ${world.height}`);
  map.querySelector("use").setAttribute("href", `#world-${run.fingerprint}`);
  map.setAttribute("aria-label", `Map: where the answers of ${run.name} are`);
  const circles = answers.map(({ label, place: [latitude, longitude] }, at) => {
    const circle = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    circle.setAttribute("cx", (longitude + 180) * world.units);
    circle.setAttribute("cy", (world.north - latitude) * world.units);
    circle.setAttribute("r", at ? 14 : 22);
    if (!at) circle.setAttribute("class", "first");
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = label;
    circle.append(title);
    return circle;
  });
  map.querySelector("g").replaceChildren(...circles.reverse()); // the first on top
}

// --- beginning ------------------------------------------------------------------------------------

async function choose() {
  const sections = shown.map((run, at) => {
    const section = $("column").content.cloneNode(true).firstElementChild;
    const select = section.querySelector("select"), report = section.querySelector(".report");
    select.append(...runs.map((one) => new Option(one.name, one.name, false, one === run)));
    select.disabled = runs.length <= shown.length; // nothing to choose from
    select.onchange = () => { shown[at] = runs[select.selectedIndex]; choose(); };
    section.setAttribute("aria-label", `Answers of ${run.name}`);
    section.querySelector(".about").textContent = [run.method, `${run.num_labels.toLocaleString("en")} labels`].filter(Boolean).join(" · ");
    report.href = `runs/${encodeURIComponent(run.name)}/report`;
    report.setAttribute("aria-label", `Report of ${run.name}`);
    report.hidden = !run.has_report || Boolean(key); // a link sends no key
    return section;
  });
  $("columns").replaceChildren(...sections);
  await ask(); // a map may come later
  await Promise.all(shown.map(load));
  await ask();
}

async function begin() {
  try {
    runs = await call("runs");
  } catch (error) {
    $("alert").textContent = error.message;
    return;
  }
  shown = runs.slice(0, 2);
  const isPlaces = runs.some((run) => run.has_map && run.dataset.startsWith("places"));
  if (isPlaces) {
    $("title").textContent = "Find a city by any of its names, in any script";
    $("query").placeholder = "القاهرة, ウィーン, Warszawa …";
  }
  $("both").hidden = shown.length < 2;
  $("lead").textContent = shown.length > 1 ? "Two models answer side by side: see one fail where the other answers." : "";
  $("attribution").textContent = [...new Set(runs.map((run) => run.attribution).filter(Boolean))].join(" ");
  $("query").value = decodeURIComponent(location.hash.slice(1));
  await choose();
  const examples = await call("examples");
  $("examples").hidden = !examples.length;
  $("examples").querySelector("ul").replaceChildren(...examples.map((one) => {
    const item = make("li", ""), button = make("button", "", one.query);
    button.dir = "auto";
    button.type = "button";
    button.title = `${one.label}: found by ${one.found_by}, missed by ${one.missed_by}`;
    button.setAttribute("aria-pressed", "false");
    button.onclick = () => { example = one; $("query").value = one.query; ask(); };
    item.append(button);
    return item;
  }));
}

$("query").oninput = () => { clearTimeout(timer); timer = setTimeout(ask, WAIT); };
$("search").onsubmit = (event) => { event.preventDefault(); ask(); };
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("evenhand-key", key);
  $("query").focus(); // whence a wrong key leads back
  begin();
};
document.onkeydown = (event) => {
  const isTyping = event.target.matches("input, select");
  if (event.key === "/" && !isTyping) { event.preventDefault(); $("query").focus(); }
  if (event.key === "Escape" && event.target === $("query")) { $("query").value = ""; ask(); }
};
begin();
