// Without this file each decision opens a page. It adds keys, decisions without leaving the page, undo, and the next page.
(() => {
  "use strict";
  const form = document.querySelector("[data-moderate]");
  const status = document.getElementById("moderated");
  const reason = document.getElementById("reason");
  const back = { pending: "hold", hidden: "hide", removed: "remove" }[form.dataset.list]; // the decision that undoes another
  const done = []; // decisions that can be undone
  let at = -1;

  const items = () => [...form.querySelectorAll(".item")];
  const box = (item) => item.querySelector("input[name=item]");
  const go = (n) => {
    const all = items();
    if (!all.length) return;
    at = Math.max(0, Math.min(n, all.length - 1));
    for (const item of all) item.classList.toggle("here", item === all[at]);
    all[at].focus();
    all[at].scrollIntoView({ block: "nearest" });
  };
  const newID = () => {
    const b = crypto.getRandomValues(new Uint8Array(16));
    b[6] = (b[6] & 15) | 64;
    b[8] = (b[8] & 63) | 128;
    const hex = [...b].map((x) => x.toString(16).padStart(2, "0")).join("");
    return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join("-");
  };

  // A decision takes its items from the list at once, and waits in the queue until the console has taken those before
  // it. So no key is lost, however fast they come.
  const list = form.querySelector(".items");
  const seen = new Set();
  const arrive = (item) => {
    item.dataset.place = seen.size;
    seen.add(item.dataset.item);
  };
  items().forEach(arrive);
  const queue = [];
  let busy = false;

  // restore puts items back where they were, with the versions that they have now.
  const restore = (job, versions) => {
    job.chosen.forEach((item, i) => {
      box(item).value = versions[i];
      box(item).checked = false;
      if (item.isConnected) return;
      list.insertBefore(item, items().find((other) => Number(other.dataset.place) > Number(item.dataset.place)) || null);
    });
    go(items().indexOf(job.chosen[0]));
  };
  const take = (job) => {
    for (const item of job.chosen) item.remove();
    at = -1;
  };
  const later = (v) => v.replace(/\d+$/, (n) => BigInt(n) + 1n); // a decision adds one version

  // post sends a job. It is true if the console did it, and null if no answer came. The act id is the job's, so a second
  // send finds the first act.
  const post = async (job) => {
    try {
      const body = new URLSearchParams(new FormData(form));
      body.delete("item");
      body.set("act_id", job.id);
      body.set("decide", job.name);
      body.set("reason", job.why);
      for (const v of job.values) body.append("item", v);
      const answer = await fetch(form.action, { method: "POST", body });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const said = page.querySelector("#outcome [role]") || page.querySelector("main");
      status.textContent = said ? said.textContent.replace(/\s+/g, " ").trim() : "The console gave no answer.";
      return Boolean(page.querySelector("#outcome [role=status] .badge.ok"));
    } catch {
      return null;
    }
  };
  const work = async () => {
    if (busy) return;
    busy = true;
    form.setAttribute("aria-busy", "true");
    for (let job; (job = queue[0]);) {
      job.sent = true;
      status.textContent = queue.length > 1 ? `Sending… ${queue.length} decisions wait.` : "Sending…";
      let did = await post(job);
      for (let more = 3; did === null && more > 0; more--) {
        status.textContent = "No answer came. Sending again: the console does not decide twice.";
        await new Promise((next) => { setTimeout(next, 1000); });
        did = await post(job);
      }
      queue.shift();
      if (did) continue;
      if (did === null) status.textContent = "No answer came. Decide again: the console does not decide twice.";
      if (job.undoes) { take(job); continue; } // it stays as it was decided
      const undo = queue.findIndex((other) => other.undoes === job);
      if (undo >= 0) queue.splice(undo, 1);
      if (done.includes(job)) done.splice(done.indexOf(job), 1);
      restore(job, job.values);
    }
    busy = false;
    form.removeAttribute("aria-busy");
  };
  const send = (job) => {
    queue.push(job);
    work();
  };
  window.addEventListener("beforeunload", (e) => { if (queue.length) e.preventDefault(); });

  // The reasons that the reader gave before, on the keys 1 to 9.
  const given = window.tidings.reasons("moderation");
  const shown = document.getElementById("reasons");
  const showReasons = () => shown.replaceChildren(...given.all().map((text, i) => {
    const li = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "small";
    button.title = text;
    button.append(Object.assign(document.createElement("kbd"), { textContent: i + 1, ariaHidden: "true" }), " " + text);
    button.addEventListener("click", () => choose(i));
    li.append(button);
    return li;
  }));
  const choose = (i) => {
    const text = given.all()[i];
    if (!text) return;
    reason.value = text;
    status.textContent = `Reason: ${text}`;
  };
  showReasons();

  const decide = (name, one) => {
    if (!items().length) return;
    let chosen = one ? [one] : items().filter((item) => box(item).checked);
    if (!chosen.length && at >= 0) chosen = [items()[at]];
    if (!chosen.length) { status.textContent = "Select an item first, or move to one with j."; return; }
    if (!reason.value.trim()) { reason.focus(); status.textContent = "Give a reason first."; return; }
    const place = items().indexOf(chosen[0]);
    const job = { id: newID(), name, why: reason.value, chosen, values: chosen.map((item) => box(item).value) };
    given.add(job.why.trim());
    showReasons();
    done.push(job);
    take(job);
    if (items().length) go(place); else { form.tabIndex = -1; form.focus(); }
    send(job);
  };

  const undo = () => {
    const last = done.pop();
    if (!last) { status.textContent = "This page has no decision to undo."; return; }
    if (!last.sent) {
      queue.splice(queue.indexOf(last), 1);
      restore(last, last.values);
      status.textContent = "Undone before it was sent.";
      return;
    }
    const values = last.values.map(later);
    restore(last, values.map(later));
    send({ id: newID(), name: back, why: "Undo: " + (reason.value.trim() || "decided too fast"), chosen: last.chosen, values, undoes: last });
  };

  form.addEventListener("submit", (e) => {
    e.preventDefault();
    if (e.submitter) decide(e.submitter.value);
  });
  reason.addEventListener("keydown", (e) => { // return to the list and its keys
    if (e.key !== "Enter") return;
    e.preventDefault();
    go(Math.max(at, 0));
  });
  form.addEventListener("click", (e) => {
    const button = e.target.closest("[data-decide]");
    if (button) decide(button.dataset.decide, button.closest(".item"));
    if (e.target.closest("[data-undo]")) undo();
  });

  // A finger that moves an item to the right approves it, and one that moves it to the left removes it.
  let finger = null;
  form.addEventListener("pointerdown", (e) => {
    const item = e.target.closest(".item");
    if (item && e.isPrimary && e.pointerType === "touch") finger = { item, from: e.clientX };
  });
  form.addEventListener("pointermove", (e) => {
    if (finger && e.isPrimary) finger.item.style.transform = `translateX(${e.clientX - finger.from}px)`;
  });
  for (const type of ["pointerup", "pointercancel"]) form.addEventListener(type, (e) => {
    if (!finger || !e.isPrimary) return;
    const { item, from } = finger;
    finger = null;
    item.style.transform = "";
    const by = e.clientX - from;
    if (type === "pointerup" && Math.abs(by) > item.clientWidth / 3) decide(by > 0 ? "approve" : "remove", item);
  });

  // The next page joins the list when its link comes near the screen.
  const pager = document.querySelector(".pager");
  const near = new IntersectionObserver((all) => { if (all.some((e) => e.isIntersecting)) more(); }, { rootMargin: "600px" });
  const more = async () => {
    near.unobserve(pager);
    const next = pager.querySelector("a[rel=next]");
    if (!next) return;
    try {
      const page = new DOMParser().parseFromString(await (await fetch(next.href)).text(), "text/html");
      const then = page.querySelector(".pager");
      if (!then) return; // an error, or the sign-in form: the link remains
      for (const item of page.querySelectorAll(".item")) if (!seen.has(item.dataset.item)) { arrive(item); list.append(item); }
      if (document.activeElement === form) go(0); // the list was empty
      pager.replaceChildren(...then.childNodes);
      near.observe(pager);
    } catch { /* no answer: the link remains */ }
  };
  near.observe(pager);

  const all = form.querySelector("[data-all]");
  all.addEventListener("click", () => {
    const some = items().some((item) => !box(item).checked);
    for (const item of items()) box(item).checked = some;
  });
  let g = 0;
  document.addEventListener("keydown", (e) => {
    const typing = e.target.closest("input:not([type=checkbox]), textarea, select, dialog");
    if (e.ctrlKey || e.metaKey || e.altKey || e.defaultPrevented || typing) return;
    const afterG = Date.now() - g < 1500; // g and a letter open a page
    g = e.key === "g" ? Date.now() : 0;
    if (afterG) return;
    const names = { a: "approve", x: "hide", d: "remove", w: form.dataset.list === "pending" ? "" : "hold" };
    if (e.key === "j") go(at + 1);
    else if (e.key === "k") go(at - 1);
    else if (e.key === "s" && at >= 0) { const b = box(items()[at]); b.checked = !b.checked; }
    else if (names[e.key]) decide(names[e.key]);
    else if (/^[1-9]$/.test(e.key)) choose(e.key - 1);
    else if (e.key === "u" || e.key === "z") undo();
    else return;
    e.preventDefault();
  });
})();
