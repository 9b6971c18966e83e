// The planner's controls, figures and address. What is computed is in planner-model.js; what is drawn is the state.
"use strict";
(() => {
  const {step, bottlenecks, scaled, slower, spread, typedProfile} = globalThis.steptimePlanner;
  const data = JSON.parse(document.getElementById("planner-data").textContent);
  const $ = (id) => document.getElementById(id);
  const OWN = "own", MOST_WORKERS = 4096;
  const EXAMPLE = "conv1, 34944, 211e6\nconv2, 614656, 896e6\nconv3, 885120, 299e6\nfc6, 37752832, 75.5e6\nfc7, 16781312, 33.6e6\nfc8, 4097000, 8.2e6";

  const profiles = new Map(data.profiles.map((profile) => {
    const {layers, parameter_bytes} = data.sizes[profile.sizes];
    return [`${profile.campaign}/${profile.case_id}`, {...profile, layers, parameter_bytes}];
  }));
  const links = new Map(data.links.map((link) => [link.name, link]));

  // numbers: smallest, largest, whether whole; sliders are logarithmic
  const NUMBERS = {
    workers: [1, MOST_WORKERS, true], batch: [1, 4096, true], speed: [0.01, 1000, false], alpha_us: [0.01, 10000, false],
    gbit_per_s: [0.01, 10000, false], bucket_mib: [0.01, 1024, false], gflops_per_s: [0.1, 1e7, false],
  };
  const CHOICES = {
    profile: [...profiles.keys(), OWN], link: [...links.keys(), OWN],
    ...Object.fromEntries(["schedule", "exchange"].map((key) => [key, [...$(key).options].map((option) => option.value)])),
  };
  const first = data.profiles[0];
  const DEFAULTS = {
    profile: first ? `${first.campaign}/${first.case_id}` : OWN, batch: first ? first.batch : 32, speed: 1, workers: 16,
    link: data.first_link || OWN, alpha_us: 50, gbit_per_s: 10, schedule: "wait_free", bucket_mib: 25, exchange: "ring", prefetch: false,
    layers: EXAMPLE, gflops_per_s: 1000,
  };
  let state = withLink({...DEFAULTS});

  // A named link's constants stand in its fields, rounded; the named link's own are what is computed with.
  function withLink(values) {
    const link = links.get(values.link);
    if (!link) return values;
    const digits = (value) => Number(value.toPrecision(4));
    return {...values, alpha_us: digits(1e6 * link.alpha_s), gbit_per_s: digits(8e-9 / link.beta_s_per_byte)};
  }

  // ------------------------------------------------------------------------------------------------------- address

  // What differs from the defaults, so that the address stays short.
  function fragment(values) {
    const isOwnLink = values.link === OWN, isOwn = values.profile === OWN, given = new URLSearchParams();
    const kept = {
      profile: true, batch: true, speed: !isOwn, layers: isOwn, gflops_per_s: isOwn, workers: true, link: true,
      alpha_us: isOwnLink, gbit_per_s: isOwnLink, schedule: true, bucket_mib: values.schedule === "buckets",
      exchange: true, prefetch: values.prefetch,
    };
    for (const [key, isKept] of Object.entries(kept)) {
      if (isKept) given.set(key, key === "prefetch" ? "1" : key === "layers" ? values[key].trim().replaceAll("\n", ";") : values[key]);
    }
    return given.toString();
  }

  // The state of an address; what it gets wrong is told and stays as by default.
  function fromFragment(text) {
    const given = new URLSearchParams(text), values = {...DEFAULTS}, faults = [];
    for (const [key, value] of given) {
      const fault = faultOf(key, value);
      if (fault) faults.push(fault);
      else if (key === "prefetch") values[key] = value === "1";
      else if (key === "layers") values[key] = value.replaceAll(";", "\n");
      else values[key] = key in NUMBERS ? Number(value) : value;
    }
    if (!given.has("batch") && profiles.has(values.profile)) values.batch = profiles.get(values.profile).batch;
    return {values: withLink(values), fault: faults[0] || ""};
  }

  function faultOf(key, value) {
    if (key in NUMBERS) {
      const [low, high, isWhole] = NUMBERS[key], number = value === "" ? NaN : Number(value);
      const isGood = number >= low && number <= high && (!isWhole || Number.isInteger(number));
      return isGood ? "" : `${key} = ${value || "nothing"}: must be a ${isWhole ? "whole " : ""}number from ${low} to ${high}`;
    }
    if (key in CHOICES) return CHOICES[key].includes(value) ? "" : `${key} = ${value}: is not one of those below`;
    if (key === "prefetch") return ["0", "1"].includes(value) ? "" : `prefetch = ${value}: must be 0 or 1`;
    return key === "layers" ? "" : `${key}: is not part of a plan`;
  }

  // ------------------------------------------------------------------------------------------------------ computing

  function planOf(values) {
    const recorded = profiles.get(values.profile);
    const profile = recorded
      ? scaled(recorded, values.batch, values.speed)
      : typedProfile(values.layers, values.batch, 1e9 * values.gflops_per_s);
    const link = links.get(values.link)
      || {name: OWN, alpha_s: values.alpha_us / 1e6, beta_s_per_byte: 8 / (values.gbit_per_s * 1e9)};
    const bucket_bytes = values.bucket_mib * 2 ** 20;
    const schedule = {aggregation: values.schedule, prefetch: values.prefetch, bucket_bytes};
    const factors = recorded ? spread(recorded) : null;
    const at = (workers, of = profile, how = schedule) => step(of, how, values.exchange, workers, link);
    return {recorded, profile, link, schedule, at, ends: factors && factors.map((factor) => slower(profile, factor))};
  }

  // Counts of workers on the speed-up curve: powers of two, up to 64 at least, and the plan's own.
  function countsOf(workers) {
    const counts = [];
    for (let count = 1; count <= Math.max(64, workers); count *= 2) counts.push(count);
    return [...new Set([...counts, workers])].sort((a, b) => a - b);
  }

  function curve(plan, counts, of, how) {
    const one = plan.at(1, of, how).step_s;
    return counts.map((count) => count * one / plan.at(count, of, how).step_s);
  }

  // -------------------------------------------------------------------------------------------------------- drawing

  const escape = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
  function number(value, digits = 3) {
    if (value === 0) return "0";
    if (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4) return value.toExponential(digits - 1);
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
    return value.toLocaleString("en-US", {minimumFractionDigits: decimals, maximumFractionDigits: decimals}).replaceAll(",", "\u202f");
  }
  const ms = (seconds) => number(1e3 * seconds);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  const KIND_LABELS = {
    io: "read input", h2d: "copy to device", forward: "forward", backward: "backward", comm: "communicate", update: "update",
  };
  const COST_LABELS = {
    communication: "communication", alpha: "latency α", beta: "the limit of bandwidth, β", device: "computing",
    input: "reading and copying",
  };

  // Round numbers that divide 0..end into at most `most` parts.
  function ticks(end, most) {
    const rough = end / most, power = 10 ** Math.floor(Math.log10(rough));
    const apart = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
    return Array.from({length: Math.floor(end / apart * (1 + 1e-9)) + 1}, (_, place) => place * apart);
  }

  // The tasks of one step in steady state: with prefetch, the next batch is read from its start on.
  function tasksOf(plan, now) {
    const {profile, schedule} = plan, tasks = [];
    const add = (lane, kind, start, seconds, title) => seconds > 0 && tasks.push({lane, kind, start, end: start + seconds, title});
    add("input", "io", 0, now.t_io_s, "read and decode a batch");
    add("input", "h2d", now.t_io_s, now.t_h2d_s, "copy it to the device");
    let time = schedule.prefetch ? 0 : now.reading_s;
    profile.layers.forEach((name, place) => {
      add("device", "forward", time, profile.forward_s[place], `${name}, forward`);
      time += profile.forward_s[place];
    });
    const begin = time;
    for (let place = profile.layers.length - 1; place >= 0; place--) {
      add("device", "backward", time, profile.backward_s[place], `${profile.layers[place]}, backward`);
      time += profile.backward_s[place];
    }
    for (const message of now.messages) {
      const [from, to] = [profile.layers[message.first], profile.layers[message.last]];
      const what = `${message.first === message.last ? from : `${from} … ${to}`}, ${number(message.n_bytes / 1e6)} MB`;
      for (const pass of message.passes) add(pass.resource, "comm", begin + pass.start_s, pass.end_s - pass.start_s, what);
    }
    add("device", "update", begin + now.t_b_s + now.t_c_no_s, now.t_u_s, "update");
    return tasks;
  }

  // Neighbours of one kind that are too narrow to see become one bar.
  function joined(tasks, narrowest) {
    const bars = [];
    for (const task of tasks) {
      const last = bars[bars.length - 1];
      const isNext = last && last.lane === task.lane && last.kind === task.kind && task.start - last.end < narrowest / 4;
      if (isNext && (last.end - last.start < narrowest || task.end - task.start < narrowest)) {
        bars[bars.length - 1] = {...last, end: task.end, title: `${last.title.split(" to ")[0]} to ${task.title}`};
      } else bars.push(task);
    }
    return bars;
  }

  function drawTimeline(plan, now) {
    const width = Math.max(300, $("timeline").clientWidth), left = 78, right = 14, lane = 34;
    const tasks = tasksOf(plan, now), lanes = ["input", "device", "link", "server in", "server out"].filter((name) => tasks.some((task) => task.lane === name));
    const x = (seconds) => left + (width - left - right) * seconds / now.step_s, height = 8 + lane * lanes.length;
    const end = 1e3 * now.step_s, marks = ticks(end, width < 500 ? 4 : 8);
    const grid = marks.map((mark, place) => {
      const at = x(mark / 1e3), text = number(mark, 3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
      const isLast = place === marks.length - 1;
      return `<path d="M${at.toFixed(1)} 0V${height}" stroke="var(--grid)"/><text x="${Math.min(at, width - right).toFixed(1)}" y="${height + 16}" text-anchor="${isLast && at > width - 40 ? "end" : "middle"}">${text}</text>`;
    });
    const bars = joined(tasks, 2 * now.step_s / (width - left - right)).map((bar) => {
      const y = 4 + lane * lanes.indexOf(bar.lane), from = x(bar.start), wide = Math.max(0.6, x(bar.end) - from);
      return `<rect x="${from.toFixed(2)}" y="${y}" width="${wide.toFixed(2)}" height="${lane - 8}" fill="var(--${bar.kind})" stroke="var(--paper)" stroke-width="${wide > 3 ? 0.6 : 0}"><title>${escape(bar.title)}: ${ms(bar.end - bar.start)} ms</title></rect>`;
    });
    const names = lanes.map((name, place) => `<text class="lane" x="0" y="${4 + lane * place + 17}">${name}</text>`);
    const said = `Timeline of one step of ${ms(now.step_s)} ms, modelled: forward ${ms(now.t_f_s)}, backward ${ms(now.t_b_s)}, communication ${ms(now.t_c_s)} of which ${ms(now.t_c_no_s)} is not hidden`;
    $("timeline").innerHTML = `<svg viewBox="0 0 ${width} ${height + 38}" role="img" aria-label="${said}">${grid.join("")}${bars.join("")}${names.join("")}<text x="${left}" y="${height + 33}">time in one step, ms</text></svg>`;
    const kinds = Object.keys(KIND_LABELS).filter((kind) => tasks.some((task) => task.kind === kind));
    $("timeline-keys").innerHTML = kinds.map((kind) => `<li><svg viewBox="0 0 30 12" aria-hidden="true"><path d="M0 0h30v12h-30z" fill="var(--${kind})"/></svg>${KIND_LABELS[kind]}</li>`).join("");
  }

  const CURVES = [["end_of_backward", "after backward"], ["wait_free", "wait-free"], ["merged", "merged"]];

  function drawSpeedUp(plan, workers) {
    const counts = countsOf(workers), width = Math.max(300, $("speed-up").clientWidth), left = 44, right = 14, height = 250;
    const most = counts[counts.length - 1], lines = CURVES.map(([key, label]) => (
      {colour: key, label, values: curve(plan, counts, plan.profile, {...plan.schedule, aggregation: key}), isOwn: key === plan.schedule.aggregation}));
    const own = lines.find((line) => line.isOwn) || {colour: "torch", label: "this plan", isOwn: true, values: curve(plan, counts, plan.profile, plan.schedule)};
    if (!lines.includes(own)) lines.push(own);
    const band = plan.ends && plan.ends.map((of) => curve(plan, counts, of, plan.schedule));
    const least = Math.min(1, ...lines.flatMap((line) => line.values), ...(band || []).flat());
    const bottom = Math.floor(Math.log2(least)), top = Math.log2(most), right_x = width - right;
    const x = (count) => left + (right_x - left) * Math.log2(count) / top;
    const y = (value) => height - height * (Math.log2(value) - bottom) / (top - bottom);
    const point = (place, value) => `${x(counts[place]).toFixed(1)} ${y(value).toFixed(1)}`;
    const every = (from, to, room) => {
      const apart = Math.ceil((to - from) / room);
      return Array.from({length: Math.floor((to - from) / apart) + 1}, (_, place) => 2 ** (from + apart * place));
    };
    const xs = every(0, Math.floor(top), width < 500 ? 6 : 12).map((count) => `<path d="M${x(count).toFixed(1)} 0V${height}" stroke="var(--grid)"/><text x="${x(count).toFixed(1)}" y="${height + 16}" text-anchor="middle">${count}</text>`);
    const ys = every(bottom, Math.floor(top), 8).map((value) => `<path d="M${left} ${y(value).toFixed(1)}H${right_x}" stroke="var(--grid)"/><text x="${left - 6}" y="${(y(value) + 4).toFixed(1)}" text-anchor="end">${value < 1 ? `1/${1 / value}` : value}</text>`);
    const shade = band ? `<path d="M${[...band[0].map((value, place) => point(place, value)), ...band[1].map((value, place) => point(place, value)).reverse()].join("L")}z" fill="var(--${cssName(own.colour)})" opacity=".18"/>` : "";
    const drawn = [...lines.filter((line) => line !== own), own].map((line) => {
      const colour = `var(--${cssName(line.colour)})`;
      const rings = line.values.map((value, place) => [counts[place], point(place, value).split(" ")])
        .map(([count, [cx, cy]]) => `<circle cx="${cx}" cy="${cy}" r="${line === own && count === workers ? 6 : 3}"/>`);
      return `<g stroke="${colour}" fill="var(--paper)" stroke-width="${line === own ? 2 : 1.2}"><path fill="none" stroke-dasharray="5 3" d="M${line.values.map((value, place) => point(place, value)).join("L")}"/>${rings.join("")}</g>`;
    });
    const ideal = `<path d="M${point(0, 1)}L${x(most).toFixed(1)} ${y(most).toFixed(1)}" stroke="var(--muted)" fill="none"/>`;
    const now = own.values[counts.indexOf(workers)];
    const said = `Speed-up over workers, modelled: ${number(now)} on ${workers} workers, at ${most} ${lines.map((line) => `${line.label} ${number(line.values[line.values.length - 1])}`).join(", ")}`;
    $("speed-up").innerHTML = `<svg viewBox="0 -8 ${width} ${height + 46}" role="img" aria-label="${said}">${xs.join("")}${ys.join("")}${ideal}${shade}${drawn.join("")}<text x="${left}" y="${height + 33}">workers</text></svg>`;
    const keys = lines.map((line) => `<li><svg viewBox="0 0 30 12" aria-hidden="true"><path d="M0 6h30" stroke="var(--${cssName(line.colour)})" stroke-width="${line === own ? 2.4 : 1.4}" stroke-dasharray="5 3"/><circle cx="15" cy="6" r="3.4" fill="var(--paper)" stroke="var(--${cssName(line.colour)})" stroke-width="1.4"/></svg>${line === own && line.label !== "this plan" ? `${line.label}, this plan` : line.label}</li>`);
    if (band) keys.push(`<li><svg viewBox="0 0 30 12" aria-hidden="true"><path d="M0 1h30v10h-30z" fill="var(--${cssName(own.colour)})" opacity=".25"/></svg>interval of this plan</li>`);
    keys.push('<li><svg viewBox="0 0 30 12" aria-hidden="true"><path d="M0 6h30" stroke="var(--muted)"/></svg>ideal</li>');
    $("speed-up-keys").innerHTML = keys.join("");
  }
  const cssName = (name) => name.replaceAll("_", "-");

  function drawHeadline(plan, now, workers) {
    const {profile} = plan, one = plan.at(1).step_s, speedUp = workers * one / now.step_s;
    const ends = plan.ends && plan.ends.map((of) => plan.at(workers, of).step_s);
    const interval = ends ? `${ms(ends[0])} to ${ms(ends[1])} ms by how well one worker's step is known` : "no interval: nothing of it was measured";
    const messages = `${now.messages.length} message${now.messages.length === 1 ? "" : "s"}`;
    $("headline").dataset.step_s = now.step_s;
    $("headline").innerHTML = `<p class="big">${ms(now.step_s)} ms a step</p><p>${interval}</p>`
      + `<p>${number(workers * profile.batch / now.step_s)} samples a second on ${workers} worker${workers === 1 ? "" : "s"}; speed-up ${number(speedUp)}, efficiency ${percent(speedUp / workers)}</p>`
      + `<p class="note">communication ${ms(now.t_c_s)} ms in ${messages}, ${ms(now.t_c_no_s)} ms of it not hidden by backward${howOften(plan)}</p>`;
  }

  // How the batch came to its times.
  function howOften({recorded, profile}) {
    if (!recorded || recorded.batch === profile.batch) return "";
    const measured = recorded.batches.map(([batch]) => batch);
    return measured.length ? `; batch ${profile.batch} from the steps measured at ${measured.join(", ")}` : `; batch ${profile.batch} in proportion to the measured ${recorded.batch}`;
  }

  function drawBottlenecks(plan, values, now) {
    const rows = bottlenecks(plan.profile, plan.schedule, values.exchange, values.workers, plan.link);
    const [most] = rows;
    $("bottleneck").textContent = most.gain > 0
      ? `The most that one change can bring is ${percent(most.gain)}: without ${COST_LABELS[most.name]} the step would take ${ms(most.step_s)} ms instead of ${ms(now.step_s)} ms.`
      : "No single one of these makes the step shorter.";
    $("without").innerHTML = rows.map((row) => `<tr><th scope="row">${COST_LABELS[row.name]}</th><td class="number">${ms(row.step_s)}</td><td class="number">${percent(row.gain)}</td></tr>`).join("");
  }

  // --------------------------------------------------------------------------------------------- the same elsewhere

  const quoted = (text) => JSON.stringify(text);
  const list = (values) => `[${values.join(", ")}]`;

  function pythonOf(plan, values) {
    const {recorded, profile, link, schedule} = plan, {exchange, workers} = values, imports = [];
    const bucket = schedule.aggregation === "buckets" ? `, bucket_bytes=${schedule.bucket_bytes}` : "";
    const how = `Schedule(${quoted(schedule.aggregation)}, prefetch=${schedule.prefetch ? "True" : "False"}${bucket})`;
    const lines = [];
    if (recorded) {
      imports.push("from steptime.report.planner import planned_profile");
      lines.push(`profile = planned_profile(Path("."), ${quoted(recorded.campaign)}, ${quoted(recorded.case_id)}, batch=${values.batch}, speed=${values.speed})`);
    } else {
      imports.push("import numpy as np");
      lines.push(`forward_s = np.array(${list(profile.forward_s)})`, "profile = LayerProfile(", `    "own", "typed", ${profile.batch}, (${profile.layers.map(quoted).join(", ")},),`, "    forward_s, 2 * forward_s,", `    np.array(${list(profile.parameter_bytes)}), np.zeros(${profile.layers.length}),`, ")");
    }
    if (links.has(values.link)) {
      imports.push("from steptime.core.machine import read_link");
      lines.push(`link = read_link(Path("data/machines/links"), ${quoted(link.name)})`);
    } else {
      imports.push("from steptime.core.machine import Link");
      lines.push(`link = Link(name="own", alpha_s=${link.alpha_s}, beta_s_per_byte=${link.beta_s_per_byte}, source="typed")`);
    }
    if (recorded || links.has(values.link)) imports.push("from pathlib import Path");
    imports.push(`from steptime.core.step import ${recorded ? "" : "LayerProfile, "}Schedule`);
    if (exchange === "ring") {
      imports.push("from steptime.model.step import predict_step");
      lines.push(`print(predict_step(profile, ${how}, ${workers}, link).step_s)`);
    } else {
      const server = {ps_central: "CentralServer", ps_sharded: "ShardedServer"}[exchange];
      const made = server ? `${server}(${workers}, line(link))` : `Collective(${workers}, all_reduce(${quoted(exchange)}, ${workers}, line(link)))`;
      imports.push(`from steptime.model.collectives import ${server ? "line" : "all_reduce, line"}`, `from steptime.model.exchanges import ${server || "Collective"}`, "from steptime.model.schedules import step_graph", "from steptime.model.what_if import steady_s");
      lines.push(`print(steady_s(step_graph(profile, ${how}, ${made})))`);
    }
    const isOurs = (line) => line.includes("steptime") ? 1 : 0;
    imports.sort((a, b) => isOurs(a) - isOurs(b) || (a < b ? -1 : 1));
    return [...imports, "", ...lines].join("\n");
  }

  // The command reads a recorded profile as it is and a named link; for what it cannot say there is Python.
  function commandOf({recorded, schedule}, values) {
    const missing = [
      [!recorded, "typed layers"], [!links.has(values.link), "a typed link"], [values.speed !== 1 && recorded, "another device"],
      [recorded && values.batch !== recorded.batch, "another batch"], [values.exchange !== "ring", "another exchange than a ring"],
      [schedule.aggregation === "buckets" && values.bucket_mib !== 25, "another bucket than 25 MiB"],
      [recorded && recorded.dtype !== "float32", "a type other than float32"],
    ].filter(([isMissing]) => isMissing).map(([, what]) => what);
    if (missing.length) return `# steptime predict has no option for ${missing.join(" or ")}: use the Python above`;
    const framework = recorded.case_id.slice(0, recorded.case_id.indexOf(`-${recorded.network}-`));
    const given = ["steptime predict", recorded.network, "--framework", framework, "--campaign", recorded.campaign, "--link", values.link, "--workers", values.workers, "--schedule", schedule.aggregation];
    return given.concat(schedule.prefetch ? ["--prefetch"] : []).join(" ");
  }

  // -------------------------------------------------------------------------------------------------------- controls

  function render() {
    const results = $("results");
    let plan;
    try {
      plan = planOf(state);
    } catch (error) {
      tell(error.message);
      results.classList.add("is-stale");
      return;
    }
    results.classList.remove("is-stale");
    const now = plan.at(state.workers);
    drawHeadline(plan, now, state.workers);
    drawTimeline(plan, now);
    drawBottlenecks(plan, state, now);
    drawSpeedUp(plan, state.workers);
    $("python").textContent = pythonOf(plan, state);
    $("command").textContent = commandOf(plan, state);
  }
  const tell = (text) => { if ($("fault").textContent !== text) $("fault").textContent = text; };

  const place = (key, value) => {
    const [low, high] = NUMBERS[key];
    return Math.round(1000 * Math.log(value / low) / Math.log(high / low));
  };
  function valueAt(key, position) {
    const [low, high, isWhole] = NUMBERS[key], value = low * (high / low) ** (position / 1000);
    return isWhole ? Math.round(value) : Number(value.toPrecision(3));
  }

  // Every control shows the state, but for the one that is being used.
  function show(except) {
    for (const control of document.querySelectorAll("#planner [data-key]")) {
      const key = control.dataset.key;
      if (control.type === "range") {
        if (control !== except) control.value = place(key, state[key]);
        control.setAttribute("aria-valuetext", String(state[key]));
      } else if (control === except) continue;
      else if (control.type === "checkbox") control.checked = state[key];
      else control.value = state[key];
      control.removeAttribute("aria-invalid");
    }
    const shown = {own: state.profile === OWN, measured: state.profile !== OWN, buckets: state.schedule === "buckets"};
    for (const box of document.querySelectorAll("#planner [data-if]")) box.hidden = !shown[box.dataset.if];
  }

  let saving = 0;
  function saveSoon() {
    clearTimeout(saving);  // browsers refuse many changes of the address in a row
    saving = setTimeout(() => history.replaceState(null, "", `#${fragment(state)}`), 250);
  }

  function change(control) {
    const key = control.dataset.key;
    if (control.type === "number") {
      const fault = faultOf(key, control.value);
      tell(fault);
      if (fault) return control.setAttribute("aria-invalid", "true");
    }
    const value = control.type === "range" ? valueAt(key, Number(control.value)) : control.type === "checkbox" ? control.checked : control.type === "number" ? Number(control.value) : control.value;
    tell("");
    state = {...state, [key]: value};
    if (key === "alpha_us" || key === "gbit_per_s") state.link = OWN;
    if (key === "link") state = withLink(state);
    if (key === "profile" && profiles.has(value)) state.batch = profiles.get(value).batch;
    show(control);
    render();
    saveSoon();
  }

  async function copy(button) {
    const code = $(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {  // not allowed here: by selecting, which also shows what to copy
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    $("copied").textContent = `${button.dataset.copy === "python" ? "Python" : "Command"} copied.`;
  }

  function choices() {
    const groups = new Map();
    for (const [key, profile] of profiles) {
      const label = profile.campaign === "local" ? `${profile.network}, this machine` : `${profile.network}, ${profile.campaign}`;
      groups.set(label, [...(groups.get(label) || []), [key, profile]]);
    }
    const option = (value, label) => `<option value="${escape(value)}">${escape(label)}</option>`;
    $("profile").innerHTML = [...groups].map(([label, items]) => {
      const options = items.map(([key, of]) => option(key, `${of.network}, ${of.setting}${of.threads > 1 ? `, ${of.threads} threads` : ""}`));
      return `<optgroup label="${escape(label)}">${options.join("")}</optgroup>`;
    }).join("") + option(OWN, "own layers, typed");
    $("link").innerHTML = [...links.keys()].map((name) => option(name, name)).join("") + option(OWN, "typed");
  }

  function fromAddress() {
    const {values, fault} = fromFragment(location.hash.slice(1));
    state = values;
    show(null);
    tell(fault);
    render();
  }

  choices();
  $("planner-static").hidden = true;
  $("planner").hidden = false;
  $("planner").addEventListener("input", (event) => event.target.dataset.key && change(event.target));
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  document.querySelector(".plan").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", fromAddress);
  let width = $("timeline").clientWidth;
  addEventListener("resize", () => {
    if ($("timeline").clientWidth !== width) {
      width = $("timeline").clientWidth;
      render();
    }
  });
  fromAddress();
})();
