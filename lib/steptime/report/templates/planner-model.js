// The step model of steptime.model.step, merging, collectives, parameter_server and exchanges, for the planner page.
// Seconds and bytes; a profile has arrays in forward order: layers, forward_s, backward_s, parameter_bytes; and t_io_s,
// t_h2d_s, t_u_s, batch. A link: alpha_s, beta_s_per_byte. A test holds every number here to Python's.
"use strict";
globalThis.steptimePlanner = (() => {
  const AFTER_BACKWARD = ["end_of_backward", "layers_after_backward"];
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // ------------------------------------------------------------------------------------------------------ exchanges

  // An all-reduce's rounds of messages as [count, share of the bytes] (collectives.all_reduce).
  function rounds(algorithm, workers) {
    const levels = Math.ceil(Math.log2(workers) - 1e-12), doublings = Math.floor(Math.log2(workers) + 1e-12);
    const fold = 2 ** doublings === workers ? [] : [[2, 1]];
    switch (algorithm) {
      case "ring": return [[2 * (workers - 1), 1 / workers]];
      case "tree": return [[2 * levels, 1]];
      case "double_tree": return [[2 * levels, (workers > 2 ? 1 : 0.5) / levels]];
      case "recursive_doubling": return [[doublings, 1], ...fold];
      case "halving_doubling":
        return [...Array.from({length: doublings}, (_, step) => [2, 0.5 ** (step + 1)]), ...fold];
    }
    throw new Error(`exchange = ${algorithm}: unknown`);
  }

  // How a message gets from every worker to every worker: its stages in order, each a resource and the seconds that it
  // keeps it; and what a whole one costs, which the merging rules weigh (a_s: however small).
  function exchange(name, workers, link) {
    const one = (n) => link.alpha_s + link.beta_s_per_byte * n;
    if (workers === 1) return {a_s: 0, time_s: () => 0, stages: []};
    if (name === "ps_central") {  // pushes come in one after the other, then the sums go out (CentralServer)
      const way = (n) => workers * one(n);
      return {
        a_s: 2 * workers * link.alpha_s, time_s: (n) => 2 * way(n),
        stages: [{resource: "server in", time_s: way}, {resource: "server out", time_s: way}],
      };
    }
    if (name === "ps_sharded") {  // N - 1 pushes and pulls of n/N through a node's interface (ShardedServer)
      const whole = (n) => 2 * (workers - 1) * one(n / workers);
      return {a_s: 2 * (workers - 1) * link.alpha_s, time_s: whole, stages: [{resource: "link", time_s: whole}]};
    }
    const parts = rounds(name, workers);
    const whole = (n) => sum(parts.map(([count, share]) => count * one(n * share)));
    const a_s = sum(parts.map(([count]) => count * link.alpha_s));
    return {a_s, time_s: whole, stages: [{resource: "link", time_s: whole}]};
  }

  // -------------------------------------------------------------------------------------------------------- merging

  // Learnable layers in sending order: when each gradient exists, from the start of backward, its bytes and its layer.
  function sendingOrder(profile) {
    const ready_s = [], n_bytes = [], layer = [];
    let now = 0;
    for (let place = profile.layers.length - 1; place >= 0; place--) {
      now += profile.backward_s[place];
      if (profile.parameter_bytes[place] > 0) {
        ready_s.push(now);
        n_bytes.push(profile.parameter_bytes[place]);
        layer.push(place);
      }
    }
    return {ready_s, n_bytes, layer};
  }

  function startTimes(ready_s, time_s) {
    let free = 0;
    return ready_s.map((ready, place) => {
      const start = Math.max(free, ready);
      free = start + time_s[place];
      return start;
    });
  }

  // A grouping is the ends of its groups: [3, 7] sends gradients 0-2 and 3-6.
  function groups(schedule, {ready_s, n_bytes}, cost) {
    const count = ready_s.length;
    switch (schedule.aggregation) {
      case "end_of_backward": return count ? [count] : [];
      case "merged": return optimalGroups(ready_s, n_bytes, cost);
      case "published_merge": return publishedGroups(ready_s, n_bytes, cost);
      case "buckets": return bucketGroups(n_bytes, schedule.bucket_bytes);
      case "wait_free": case "layers_after_backward": return ready_s.map((_, place) => place + 1);
    }
    throw new Error(`schedule = ${schedule.aggregation}: unknown`);
  }

  function bucketGroups(n_bytes, bucket_bytes) {
    const ends = [];
    let held = 0;
    n_bytes.forEach((size, place) => {
      held += size;
      if (held >= bucket_bytes || place === n_bytes.length - 1) {
        ends.push(place + 1);
        held = 0;
      }
    });
    return ends;
  }

  // The grouping that ends earliest: E[j] = min over i < j of max(E[i], ready[j]) + T(bytes i..j) (optimal_groups).
  function optimalGroups(ready_s, n_bytes, cost) {
    const count = ready_s.length, total = [0];
    n_bytes.forEach((size, place) => total.push(total[place] + size));
    const best = [0], number = [0], before = [0];
    for (let j = 1; j <= count; j++) {
      let least = Infinity, from = 0;
      for (let i = 0; i < j; i++) {
        const end = Math.max(best[i], ready_s[j - 1]) + cost.time_s(total[j] - total[i]);
        if (end < least || (end === least && number[i] < number[from])) [least, from] = [end, i];
      }
      best.push(least);
      before.push(from);
      number.push(number[from] + 1);
    }
    const ends = [];
    for (let j = count; j; j = before[j]) ends.unshift(j);
    return ends;
  }

  // MG-WFBP's own rule, one pass from the last layer down (published_groups).
  function publishedGroups(ready_s, n_bytes, cost) {
    const count = ready_s.length, sizes = [...n_bytes], times = sizes.map(cost.time_s), ends = [];
    let free = 0;  // when the messages before `place` have left; what follows is computed anew after each merge
    for (let place = 0; place < count; place++) {
      const start = Math.max(free, ready_s[place]), next = ready_s[place + 1];
      const overlaps = place < count - 1 && next < start + times[place];
      if (overlaps && (start > next || next - start < cost.a_s)) {
        sizes[place + 1] += sizes[place];
        times[place + 1] = cost.time_s(sizes[place + 1]);
        free = start;
      } else {
        ends.push(place + 1);
        free = start + times[place];
      }
    }
    return ends;
  }

  // ----------------------------------------------------------------------------------------------------- one step

  // The step of `workers`; `free` names what takes no time while the messages stay as they are merged: "communication",
  // "device" or "input" (what_if.bottlenecks).
  function step(profile, schedule, exchangeName, workers, link, free = "") {
    const cost = exchange(exchangeName, workers, link);
    const order = sendingOrder(profile), ends = workers > 1 ? groups(schedule, order, cost) : [];
    const device = free === "device" ? 0 : 1, reads = free === "input" ? 0 : 1, sends = free === "communication" ? 0 : 1;
    const t_f_s = device * sum(profile.forward_s), t_b_s = device * sum(profile.backward_s);
    const t_u_s = device * profile.t_u_s, t_io_s = reads * profile.t_io_s, t_h2d_s = reads * profile.t_h2d_s;
    const isAfter = AFTER_BACKWARD.includes(schedule.aggregation);
    const messages = ends.map((end, place) => {
      const first = place ? ends[place - 1] : 0;
      return {
        first: order.layer[first], last: order.layer[end - 1], n_bytes: sum(order.n_bytes.slice(first, end)),
        ready_s: isAfter ? t_b_s : device * order.ready_s[end - 1], passes: [],
      };
    });
    let arrivals = messages.map((message) => message.ready_s);
    for (const {resource, time_s} of cost.stages) {
      const times = messages.map((message) => sends * time_s(message.n_bytes));
      const starts = startTimes(arrivals, times);
      arrivals = starts.map((start, place) => start + times[place]);
      messages.forEach((message, place) => {
        message.passes.push({resource, start_s: starts[place], end_s: arrivals[place]});
      });
    }
    const t_c_s = sends * sum(messages.map((message) => cost.time_s(message.n_bytes)));
    const t_c_no_s = Math.max(0, (arrivals.length ? arrivals[arrivals.length - 1] : 0) - t_b_s);
    const computing = t_f_s + t_b_s + t_c_no_s + t_u_s, reading = t_io_s + t_h2d_s;
    const step_s = schedule.prefetch ? Math.max(reading, computing) : reading + computing;
    return {t_io_s, t_h2d_s, t_f_s, t_b_s, t_c_s, t_c_no_s, t_u_s, step_s, messages, reading_s: reading};
  }

  // The step without each of its costs, the largest gain first. Without alpha or beta gradients are merged anew.
  function bottlenecks(profile, schedule, exchangeName, workers, link) {
    const now = step(profile, schedule, exchangeName, workers, link).step_s;
    const without = (free) => step(profile, schedule, exchangeName, workers, link, free).step_s;
    const over = (change) => step(profile, schedule, exchangeName, workers, {...link, ...change}).step_s;
    const rows = [
      ["communication", without("communication")], ["alpha", over({alpha_s: 0})], ["beta", over({beta_s_per_byte: 0})],
      ["device", without("device")], ["input", without("input")],
    ];
    return rows.map(([name, step_s]) => ({name, step_s, gain: now ? (now - step_s) / now : 0}))
      .sort((a, b) => b.gain - a.gain);
  }

  // ------------------------------------------------------------------------------------------------------- profiles

  // report.planner.batch_factor: how many times as long a step of `batch` takes as one of the recorded batch.
  function batchFactor(batches, recorded, batch) {
    if (!batches.length) return batch / recorded;
    const time_s = (at) => {
      const next = batches.findIndex(([size]) => size >= at), last = batches[batches.length - 1];
      if (next < 0) return last[1] * at / last[0];
      if (next === 0) return batches[0][1];
      const [[x0, y0], [x1, y1]] = [batches[next - 1], batches[next]];
      return y0 + (y1 - y0) / (x1 - x0) * (at - x0);
    };
    return time_s(batch) / time_s(recorded);
  }

  // report.planner.scaled: another batch, on a device `speed` times as fast.
  function scaled(profile, batch, speed) {
    const factor = batchFactor(profile.batches, profile.batch, batch);
    return {
      ...profile, batch,
      forward_s: profile.forward_s.map((seconds) => seconds * factor / speed),
      backward_s: profile.backward_s.map((seconds) => seconds * factor / speed),
      t_io_s: profile.t_io_s * factor, t_h2d_s: profile.t_h2d_s * factor, t_u_s: profile.t_u_s / speed,
    };
  }

  // All times of a profile `factor` times as long.
  function slower(profile, factor) {
    const longer = (seconds) => seconds * factor;
    return {
      ...profile, forward_s: profile.forward_s.map(longer), backward_s: profile.backward_s.map(longer),
      t_io_s: longer(profile.t_io_s), t_h2d_s: longer(profile.t_h2d_s), t_u_s: longer(profile.t_u_s),
    };
  }

  // report.planner.spread: between which factors of all times the step lies; null without a measured step.
  function spread(recorded) {
    if (!recorded.step_s) return null;
    const one = recorded.t_io_s + recorded.t_h2d_s + sum(recorded.forward_s) + sum(recorded.backward_s) + recorded.t_u_s;
    return [Math.min(1, recorded.step_s[1] / one), Math.max(1, recorded.step_s[2] / one)];
  }

  // Layers typed as lines "name, parameters, forward FLOPs of a sample", on a device that reaches `flops_per_s`.
  // Float32 gradients; backward takes twice as long as forward. Throws an Error naming the line.
  function typedProfile(text, batch, flops_per_s) {
    const lines = text.split(/\n|;/).map((line, place) => [line.trim(), place + 1]).filter(([line]) => line && line[0] !== "#");
    if (!lines.length) throw new Error("layers: none yet; write one a line: name, parameters, forward FLOPs of a sample");
    if (lines.length > 2000) throw new Error(`layers: ${lines.length}; the page takes 2,000 at most`);
    const rows = lines.map(([line, place]) => {
      const [name, ...values] = line.split(",").map((part) => part.trim());
      const [parameters, flops] = values.map((value) => value === "" ? NaN : Number(value));
      if (values.length !== 2 || !(parameters >= 0 && parameters < Infinity && flops >= 0 && flops < Infinity)) {
        throw new Error(`layers, line ${place}: “${line.slice(0, 40)}”: write name, parameters, forward FLOPs of a sample`);
      }
      return {name, parameters, forward_s: flops * batch / flops_per_s};
    });
    if (!rows.some((row) => row.forward_s > 0)) throw new Error("layers: none has FLOPs; give at least one");
    return {
      network: "own", batch, layers: rows.map((row) => row.name), parameter_bytes: rows.map((row) => 4 * row.parameters),
      forward_s: rows.map((row) => row.forward_s), backward_s: rows.map((row) => 2 * row.forward_s),
      t_io_s: 0, t_h2d_s: 0, t_u_s: 0, step_s: null, batches: [],
    };
  }

  return {exchange, groups, sendingOrder, step, bottlenecks, batchFactor, scaled, slower, spread, typedProfile};
})();
