// Without this file each decision opens a page. It adds keys, decisions without leaving the page, and undo.
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

  // send posts a decision once. After a lost answer it keeps the act id, so a second send finds the first act.
  let busy = false;
  const send = async (decide, values, why) => {
    if (busy) return null;
    busy = true;
    form.setAttribute("aria-busy", "true");
    status.textContent = "Sending…";
    try {
      const body = new URLSearchParams(new FormData(form));
      body.delete("item");
      body.set("decide", decide);
      body.set("reason", why);
      for (const v of values) body.append("item", v);
      const answer = await fetch(form.action, { method: "POST", body });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      form.elements.act_id.value = newID();
      const said = page.querySelector("#outcome [role]") || page.querySelector("main");
      status.textContent = said ? said.textContent.replace(/\s+/g, " ").trim() : "The console gave no answer.";
      return Boolean(page.querySelector("#outcome [role=status] .badge.ok"));
    } catch {
      status.textContent = "No answer came. Decide again: the console does not decide twice.";
      return null;
    } finally {
      busy = false;
      form.removeAttribute("aria-busy");
    }
  };

  const decide = async (name) => {
    if (!items().length || busy) return;
    let chosen = items().filter((item) => box(item).checked);
    if (!chosen.length && at >= 0) chosen = [items()[at]];
    if (!chosen.length) { status.textContent = "Select an item first, or move to one with j."; return; }
    if (!reason.value.trim()) { reason.focus(); status.textContent = "Give a reason first."; return; }
    const values = chosen.map((item) => box(item).value);
    const place = items().indexOf(chosen[0]);
    if (!(await send(name, values, reason.value))) return;
    done.push({ values, chosen });
    for (const item of chosen) item.remove();
    at = -1;
    if (items().length) go(place); else { form.tabIndex = -1; form.focus(); }
  };

  const undo = async () => {
    const last = done.at(-1);
    if (!last || busy) { if (!last) status.textContent = "This page has no decision to undo."; return; }
    const later = (v) => v.replace(/\d+$/, (n) => BigInt(n) + 1n); // a decision adds one version
    const values = last.values.map(later);
    if (!(await send(back, values, "Undo: " + (reason.value.trim() || "decided too fast")))) return;
    done.pop();
    last.chosen.forEach((item, i) => {
      box(item).value = later(values[i]);
      box(item).checked = false;
      form.querySelector(".items").append(item);
    });
    go(items().length - 1);
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
    else if (e.key === "u") undo();
    else return;
    e.preventDefault();
  });
})();
