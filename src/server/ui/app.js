"use strict";
const $ = id => document.getElementById(id);
const state = { doc: null, messages: [], abort: null, speeds: [], context: 0 };

// Numbers for people.
function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 1000 && i + 1 < units.length) { n /= 1000; ++i; }
  return (i === 0 || n >= 100 ? n.toFixed(0) : n.toFixed(1)) + " " + units[i];
}
const count = n => Math.round(n).toLocaleString("en");
function duration(s) {
  return s >= 90 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : s >= 10 ? `${Math.round(s)} s` : `${s.toFixed(1)} s`;
}

function headers() {
  const h = { "Content-Type": "application/json" };
  if ($("key").value) h.Authorization = "Bearer " + $("key").value;
  return h;
}
async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (response.status === 401) for (const e of document.querySelectorAll(".key")) e.hidden = false;
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response.json();
}

async function connect() {
  try {
    const props = await get("props");
    state.context = props.default_generation_settings.n_ctx;
    $("model").textContent = `${props.model_alias}, ${count(state.context)} tokens of context`;
    $("m-context").textContent = count(state.context) + " tokens";
    const chosen = $("recipe").value;
    $("recipe").replaceChildren(...props.kv.map(name => new Option(name, name, false, name === chosen)));
    $("status").textContent = "";
    await showMemory();
  } catch (error) {
    $("model").textContent = "not connected";
    $("status").textContent = error.message;
  }
}

function addMessage(role, text) {
  const item = document.createElement("li");
  const who = document.createElement("span");
  const body = document.createElement("span");
  item.className = role;
  who.className = "who";
  who.textContent = role === "user" ? "You" : role === "wrong" ? "Error" : "longkv";
  body.textContent = text;
  item.append(who, body);
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return body;
}

async function takeFile(file) {
  if (!file) return;
  const text = await file.text();
  if (text.includes("\u0000")) {
    $("status").textContent = `${file.name} is not a text`;
    return;
  }
  state.doc = { name: file.name, text };
  fresh();
  $("document-text").textContent = `${file.name}: ${bytes(file.size)}. It is read with your next question.`;
  $("remove").hidden = false;
  $("question").focus();
  try {
    const answer = await fetch("tokenize", { method: "POST", headers: headers(), body: JSON.stringify({ content: text }) });
    const tokens = (await answer.json()).tokens.length;
    const fits = tokens < state.context ? "" : ` More than the ${count(state.context)} that fit.`;
    $("document-text").textContent = `${file.name}: ${count(tokens)} tokens.${fits}`;
  } catch { /* the question will say what is wrong */ }
}

function fresh() {
  if (state.abort) state.abort.abort();
  state.messages = [];
  $("messages").replaceChildren();
  $("status").textContent = "";
}

// Messages of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const message = held.slice(0, end);
      if (message.startsWith("data: ") && message !== "data: [DONE]") yield JSON.parse(message.slice(6));
    }
  }
}

function showProgress(p) {
  const read = p.processed - p.cache, seconds = p.time_ms / 1000;
  const rate = seconds > 0 ? read / seconds : 0;
  $("reading").hidden = false;
  $("progress").max = p.total;
  $("progress").value = p.processed;
  // Before the first piece was read there is no speed to speak of.
  const speed = rate > 0 ? `, ${count(rate)} tokens/s, ${duration((p.total - p.processed) / rate)} left` : "";
  $("progress-text").value = `${count(p.processed)} of ${count(p.total)} tokens${speed}`;
  $("m-held").textContent = count(p.cache) + " tokens";
  if (rate > 0) $("m-read").textContent = count(rate) + " tokens/s";
}

function drawPlot() {
  const n = state.speeds.length, most = Math.max(...state.speeds, 1);
  $("plot-line").setAttribute("points", state.speeds.map((v, i) =>
    `${(n > 1 ? i / (n - 1) * 300 : 0).toFixed(1)},${(86 - v / most * 80).toFixed(1)}`).join(" "));
  if (n > 0) $("plot-text").textContent = `Now ${state.speeds[n - 1].toFixed(1)}, at most ${most.toFixed(1)} tokens a second.`;
}

// KV bytes by where they lie.
async function showMemory() {
  const held = await get("cache");
  $("m-memory").textContent = bytes(held.slots.bytes);
  $("m-stored").textContent = bytes(held.cpu_cache.bytes);
  $("m-disk").textContent = bytes(held.disk.bytes);
}

async function pollSlots() {
  if (!state.abort) return;
  try {
    await showMemory();
    const slots = await get("slots");
    const mine = slots.find(s => s.id_task === state.id);
    if (mine && mine.kv.bytes_read_per_token > 0) $("m-bytes").textContent = bytes(mine.kv.bytes_read_per_token);
    if (mine && mine.kv.captured_mass !== undefined) $("m-mass").textContent = (100 * mine.kv.captured_mass).toFixed(1) + " %";
  } catch { /* the slots need not be shown */ }
  setTimeout(pollSlots, 400);
}

// In full, with places to break a line behind commas.
function showRecipe(text) {
  const parts = text ? text.split(/(?<=,)/) : [];
  $("recipe-text").replaceChildren(...parts.flatMap(part => [part, document.createElement("wbr")]));
}

function showTimings(t) {
  const read = t.kv.bytes_read_per_token + t.kv.index_bytes_read_per_token;
  const mass = t.kv.captured_mass === undefined ? "–" : (100 * t.kv.captured_mass).toFixed(1) + " %";
  $("m-speed").textContent = t.predicted_per_second.toFixed(1) + " tokens/s";
  if (t.prompt_n > 0) $("m-read").textContent = count(t.prompt_per_second) + " tokens/s";
  $("m-held").textContent = count(t.cache_n) + " tokens";
  $("m-bytes").textContent = bytes(read);
  $("m-mass").textContent = mass;
  showRecipe(t.kv.recipe);
  const row = $("runs").tBodies[0].insertRow(0);
  for (const cell of [$("recipe").value, t.predicted_per_second.toFixed(1), bytes(read), mass]) row.insertCell().textContent = cell;
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("reading").hidden = true;
}

async function ask(question) {
  const first = state.messages.length === 0 && state.doc ? state.doc.text + "\n\n" : "";
  state.messages.push({ role: "user", content: first + question });
  addMessage("user", question);
  const body = addMessage("assistant", "");
  state.abort = new AbortController();
  state.speeds = [];
  state.id = "";
  busy(true);
  $("status").textContent = "Waiting…";
  for (const meter of ["m-first", "m-read", "m-speed", "m-held", "m-bytes", "m-mass"]) $(meter).textContent = "–";
  showRecipe("");
  setTimeout(pollSlots, 200);
  const begin = performance.now();
  let answer = "", last = 0, ended = false;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: state.abort.signal,
      body: JSON.stringify({
        messages: state.messages, stream: true, return_progress: true, timings_per_token: true,
        max_tokens: Number($("length").value), temperature: Number($("temperature").value),
        kv: $("recipe").value || null, kv_check: 16,
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const m of events(response)) {
      if (m.error) throw new Error(m.error.message);
      state.id = m.id;
      if (m.prompt_progress) {
        showProgress(m.prompt_progress);
        $("status").textContent = "Reading…";
      }
      const text = m.choices[0]?.delta.content;
      if (text) {
        if (!answer) {
          $("m-first").textContent = duration((performance.now() - begin) / 1000);
          $("status").textContent = "Answering…";
          $("reading").hidden = true;
        }
        answer += text;
        body.textContent = answer;
        const now = performance.now();
        if (m.timings?.predicted_n > 1 && now - last > 40) {
          last = now;
          $("m-speed").textContent = m.timings.predicted_per_second.toFixed(1) + " tokens/s";
          state.speeds.push(m.timings.predicted_per_second);
          drawPlot();
        }
      }
      if (m.timings?.kv) showTimings(m.timings);
      const finish = m.choices[0]?.finish_reason;
      ended ||= Boolean(finish);
      if (finish) $("status").textContent = finish === "length" ? "Cut at the number of tokens." : "Done.";
    }
    if (!ended) throw new Error("The connection ended before the answer did.");
  } catch (error) {
    if (error.name === "AbortError") {
      $("status").textContent = "Stopped.";
    } else {
      $("status").textContent = "";
      addMessage("wrong", error.message);
      if (!answer) {
        state.messages.pop();
        body.parentElement.remove();
      }
    }
  }
  if (answer) state.messages.push({ role: "assistant", content: answer });
  else if (state.messages.at(-1)?.role === "user") state.messages.pop();
  state.abort = null;
  busy(false);
  showMemory().catch(() => {});
  $("question").focus();
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || state.abort) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => state.abort?.abort());
document.addEventListener("keydown", event => { if (event.key === "Escape") state.abort?.abort(); });
$("fresh").addEventListener("click", () => { fresh(); $("question").focus(); });
$("file").addEventListener("change", event => takeFile(event.target.files[0]));
$("remove").addEventListener("click", () => { state.doc = null; location.reload(); });
$("key").addEventListener("change", connect);
// Wherever on the page a file is dropped: beside the box the browser would open it and the conversation would be gone.
const bringsFile = event => event.dataTransfer?.types.includes("Files");
for (const name of ["dragover", "dragenter"])
  document.addEventListener(name, event => {
    if (!bringsFile(event)) return;
    event.preventDefault();
    $("drop").classList.add("over");
  });
document.addEventListener("dragleave", event => { if (!event.relatedTarget) $("drop").classList.remove("over"); });
document.addEventListener("drop", event => {
  if (!bringsFile(event)) return;
  event.preventDefault();
  $("drop").classList.remove("over");
  takeFile(event.dataTransfer.files[0]);
});
connect();
