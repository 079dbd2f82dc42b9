// Without this file an act opens a page with its form, and then a page with its outcome. With it the form is a dialog over
// the page. A message then has the outcome, and the page shows its effect.
(() => {
  "use strict";
  const ACT = "/console/act/";
  const parse = async (answer) => new DOMParser().parseFromString(await answer.text(), "text/html");
  const make = (tag, set, ...children) => {
    const e = Object.assign(document.createElement(tag), set);
    e.append(...children);
    return e;
  };

  const dialog = make("dialog", { id: "dialog" });
  dialog.setAttribute("aria-labelledby", "act-title");
  const toast = make("div", { id: "toast" });
  toast.setAttribute("role", "status");
  document.body.append(dialog, toast);

  // show opens the form of an act. It is false if the page has none.
  const show = (page) => {
    const form = page.querySelector(`form[action^="${ACT}"]`);
    if (!form) return false;
    dialog.replaceChildren(form.closest("section"));
    const reason = dialog.querySelector("#act-reason");
    const given = window.tidings.reasons(sort(form)).all();
    const list = make("ol", { className: "reasons", ariaLabel: "Reasons that you gave" }, ...given.map((text) => {
      const button = make("button", { type: "button", className: "small", title: text }, text);
      button.addEventListener("click", () => { reason.value = text; reason.focus(); });
      return make("li", {}, button);
    }));
    if (given.length) reason.before(list); // Tab leads from the reason to the button
    if (!dialog.open) dialog.showModal();
    reason.focus();
    return true;
  };
  const sort = (form) => form.getAttribute("action").slice(ACT.length).split(".")[0];
  const wrong = (text) => {
    const p = make("p", { className: "trouble" }, text);
    p.setAttribute("role", "alert");
    dialog.querySelectorAll(".trouble").forEach((old) => old.remove());
    dialog.querySelector("form").before(p);
  };

  // tell shows the outcome of an act, or how far it is. It is true at the end.
  const tell = (outcome, url) => {
    const said = outcome.querySelector(":scope > [role]");
    const line = said || outcome.querySelector("p");
    const level = ["ok", "warn", "bad"].find((l) => said && said.querySelector(`.badge.${l}`)) || "info";
    const close = make("button", { type: "button", className: "plain small", ariaLabel: "Close the message" }, "✕");
    close.addEventListener("click", () => toast.replaceChildren());
    const acts = [...outcome.querySelectorAll(`a.button[href^="${ACT}"]`)];
    toast.replaceChildren(make("div", { className: `toast ${level}` }, make("p", {}, ...line.childNodes),
      make("a", { href: url, id: "view" }, "View"), ...acts, close));
    return Boolean(said);
  };

  // mend shows the page's own data after an act. The list of moderators keeps what it knows in its script, so it loads again.
  const mend = async (url) => {
    if (document.querySelector("[data-moderate]")) {
      sessionStorage.setItem("tidings-toast", url);
      location.reload();
      return;
    }
    const answer = await fetch(location.href);
    if (!answer.ok) { location.assign(url); return; } // what the act was about is gone
    const main = document.querySelector("main");
    const text = (await parse(answer)).querySelector("main").innerHTML;
    await window.htmx.swap({ text, sourceElement: main, target: main, swap: "innerMorph" });
    if (document.activeElement === document.body) main.focus();
  };

  // follow reads the page of an act until the act has ended.
  let following = "";
  const follow = async (page, url) => {
    following = url;
    for (let outcome = page.querySelector("#outcome"); following === url; outcome = page.querySelector("#outcome")) {
      if (!outcome) { location.assign(url); return; }
      if (tell(outcome, url)) { await mend(url); return; }
      await new Promise((next) => { setTimeout(next, 1000); });
      try { page = await parse(await fetch(url)); } catch { /* no answer: ask again */ }
    }
  };

  const send = async (form) => {
    const data = new FormData(form);
    const body = form.enctype === "multipart/form-data" ? data : new URLSearchParams(data);
    let answer;
    let page;
    try {
      answer = await fetch(form.action, { method: "POST", body });
      page = await parse(answer);
    } catch {
      wrong("No answer came. Send it again: the console does it once.");
      return;
    }
    const secret = page.querySelector("#outcome .secret");
    if (page.querySelector("#outcome")) window.tidings.reasons(sort(form)).add(body.get("reason").trim());
    if (secret) {
      dialog.replaceChildren(page.querySelector("#outcome")); // shown once, so it stays until the reader closes it
      dialog.querySelector("h1").id = "act-title";
    } else if (page.querySelector("#outcome")) {
      dialog.close();
      await follow(page, answer.url);
    } else if (!show(page)) {
      wrong((page.querySelector("main") || page.body).textContent.replace(/\s+/g, " ").trim());
    }
  };

  document.addEventListener("click", async (e) => {
    if (e.defaultPrevented || e.button !== 0 || e.ctrlKey || e.metaKey || e.shiftKey || e.altKey) return;
    const link = e.target.closest("a[href]");
    if (!link) return;
    if (dialog.contains(link) && link.matches("[data-back]")) {
      e.preventDefault();
      dialog.close();
      return;
    }
    if (!link.getAttribute("href").startsWith(ACT)) return;
    e.preventDefault();
    try {
      if (show(await parse(await fetch(link.href)))) return;
    } catch { /* no answer: the browser says so */ }
    location.assign(link.href);
  });
  // A chosen file fills its field at once, so that the reader sees it and may change it.
  document.addEventListener("change", async (e) => {
    const chosen = e.target.closest("input[data-fills]");
    const file = chosen && chosen.files[0];
    if (!file) return;
    const field = document.getElementById(chosen.dataset.fills);
    const says = document.getElementById(chosen.getAttribute("aria-describedby"));
    chosen.value = ""; // else the console takes the file instead of the field
    if (file.size > 200_000) {
      says.textContent = `${file.name} is larger than 200 kB.`;
      return;
    }
    field.value = await file.text();
    says.textContent = `The text above is that of ${file.name}.`;
  });

  dialog.addEventListener("submit", (e) => {
    if (e.target.method !== "post") return;
    e.preventDefault();
    e.stopPropagation(); // console.js lets a form be sent once
    if (dialog.ariaBusy) return;
    dialog.ariaBusy = "true";
    send(e.target).finally(() => { dialog.ariaBusy = null; });
  });
  dialog.addEventListener("keydown", (e) => {
    if (e.key !== "Enter" || !(e.ctrlKey || e.metaKey)) return;
    e.preventDefault();
    const form = dialog.querySelector("form");
    if (form) form.requestSubmit();
  });

  dialog.addEventListener("close", () => {
    const secret = dialog.querySelector(".secret");
    dialog.replaceChildren();
    if (secret) mend(location.href);
  });

  const last = sessionStorage.getItem("tidings-toast");
  if (last) {
    sessionStorage.removeItem("tidings-toast");
    fetch(last).then(parse).then((page) => { const o = page.querySelector("#outcome"); if (o) tell(o, last); }).catch(() => {});
  }
})();
