// Without this file readers can still read and act. It adds how long ago something was, live pages, keys, copying and the theme.
(() => {
  "use strict";
  const root = document.documentElement;

  // Times: how long ago each is, as the server's function relative has it, so that nothing moves while the page loads. The
  // title has the exact time, in the reader's zone and in UTC.
  const format = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
  const relative = (at) => {
    const since = Date.now() - at;
    const s = Math.floor(Math.abs(since) / 1000);
    if (s < 60) return "just now";
    if (s >= 60 * 86400) return at.toISOString().slice(0, 10);
    const n = Math.floor(s < 3600 ? s / 60 : s < 48 * 3600 ? s / 3600 : s / 86400);
    const span = `${n} ${s < 3600 ? "min" : s < 48 * 3600 ? "h" : "days"}`;
    return since < 0 ? `in ${span}` : `${span} ago`;
  };
  const relate = () => {
    for (const t of document.querySelectorAll("time[datetime]")) {
      const at = new Date(t.dateTime);
      const shown = t.querySelector(".scripted");
      const text = relative(at);
      if (shown.textContent !== text) shown.textContent = text;
      const title = `${format.format(at)} (${t.dateTime})`;
      if (t.title !== title) t.title = title;
    }
  };
  relate();
  setInterval(relate, 10000);
  // The observer runs before the next paint.
  new MutationObserver(relate).observe(document.body, { childList: true, subtree: true, characterData: true });

  // On a phone the navigation is a strip: scroll to the entry of this page.
  const nav = document.querySelector(".body > nav");
  const here = nav && nav.querySelector("[aria-current]");
  if (here) nav.scrollLeft = here.offsetLeft - nav.offsetLeft - (nav.clientWidth - here.offsetWidth) / 2;

  const say = (text) => { document.getElementById("said").textContent = text; };

  // A live page brings the health of the installation: the badge, the title and the icon show it.
  const title = document.title.replace(/^\(\d+\) /, "");
  const showHealth = () => {
    const is = document.getElementById("health");
    const badge = document.getElementById("causes");
    if (!is || !badge) return;
    const n = Number(is.dataset.causes);
    badge.textContent = n || "";
    badge.className = "badge " + is.dataset.level;
    document.title = (n ? `(${n}) ` : "") + title;
    const icon = document.querySelector("link[rel=icon]");
    const href = icon.href.replace(/icon[^/]*$/, `icon${n ? "-" + is.dataset.level : ""}.svg`);
    if (icon.href !== href) icon.href = href;
  };

  // Live pages. A browser has six connections to a server, so one visible window of a page has its stream, and passes the
  // messages on to the others. Without locks (HTTP to another machine) each window has its own.
  const live = document.querySelector("[data-live]");
  const fresh = document.getElementById("fresh");
  let asOf = performance.now(); // when the server read the page's data
  let trouble = "";
  let held = ""; // content that waits until the pointer has left
  const showAge = () => {
    const age = Math.floor((performance.now() - asOf) / 1000);
    const time = new Date(performance.timeOrigin + asOf).toTimeString().slice(0, 8);
    const level = trouble || age >= 15 ? "bad" : age >= 3 ? "warn" : "ok";
    fresh.textContent = { ok: `Live, ${age} s ago`, warn: `Stale, ${age} s`, bad: `${trouble || "No answer"}, data of ${time}` }[level];
    if (level === "bad" && !root.classList.contains("stale")) say(fresh.textContent);
    root.classList.toggle("stale", level === "bad");
    fresh.className = "badge " + level;
  };
  const take = async (kind, text) => {
    trouble = kind === "trouble" ? text : "";
    if (kind === "fresh") asOf = performance.now() - Number(text);
    if (kind === "message" && live.querySelector("[data-hold]:hover, [data-hold] :focus-visible")) {
      held = text; // the reader is at a row that would move away
      live.ariaBusy = "true";
    } else if (kind === "message") {
      held = "";
      live.ariaBusy = null;
      await window.htmx.swap({ text, sourceElement: live, target: live, swap: "innerMorph" });
      showHealth();
      root.dataset.live = String(Number(root.dataset.live || 0) + 1);
    }
    showAge();
  };
  if (live) {
    const name = `tidings ${document.body.dataset.session} ${live.dataset.live}`;
    const windows = new BroadcastChannel(name);
    let last; // the content that this window's stream has sent
    windows.addEventListener("message", (e) => {
      if (e.data.ask && last) windows.postMessage(last);
      else if (!e.data.ask && !document.hidden) take(...e.data);
    });
    const lead = () => new Promise((done) => {
      let stream, again;
      const open = () => {
        stream = new EventSource(live.dataset.live);
        for (const kind of ["message", "fresh", "trouble"]) stream.addEventListener(kind, (e) => {
          if (kind === "message") last = [kind, e.data];
          windows.postMessage([kind, e.data]);
          take(kind, e.data);
        });
        stream.addEventListener("error", () => { if (stream.readyState === EventSource.CLOSED) again = setTimeout(open, 2000); });
      };
      open();
      const end = () => { clearTimeout(again); stream.close(); last = undefined; done(); };
      document.addEventListener("visibilitychange", end, { once: true });
    });
    const watch = () => {
      if (document.hidden) return;
      windows.postMessage({ ask: true });
      if (!navigator.locks) { lead(); return; }
      const stop = new AbortController();
      document.addEventListener("visibilitychange", () => stop.abort(), { once: true });
      navigator.locks.request(name, { signal: stop.signal }, lead).catch(() => { /* hidden before its turn */ });
    };
    watch();
    document.addEventListener("visibilitychange", watch);
    for (const leaves of ["pointerout", "focusout"]) live.addEventListener(leaves, () => {
      setTimeout(() => { if (held) take("message", held); }); // after the browser knows where the pointer is
    });
    setInterval(showAge, 1000);
  }

  // The theme: auto (the system's), light, dark.
  const theme = document.getElementById("theme");
  const name = () => { theme.textContent = "Theme: " + (root.dataset.theme || "auto"); };
  name();
  theme.addEventListener("click", () => {
    const next = { undefined: "light", light: "dark", dark: "" }[root.dataset.theme];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    try { localStorage.setItem("tidings-theme", next); } catch { /* for this page alone */ }
    name();
  });

  // Copying.
  document.addEventListener("click", async (e) => {
    const b = e.target.closest("[data-copy]");
    if (!b) return;
    try {
      await navigator.clipboard.writeText(b.dataset.copy);
      say("Copied");
      b.textContent = "Copied";
    } catch {
      say("The browser does not allow copying");
    }
  });

  // Reasons that the reader gave for acts of a sort, at most nine. This browser keeps them for the token. Each stays in its
  // place until nine others were used after it, so hands learn its number.
  const reasons = (sort) => {
    const name = `tidings-reasons ${document.body.dataset.session} ${sort}`;
    const read = () => { try { return JSON.parse(localStorage.getItem(name)) || []; } catch { return []; } };
    return {
      all: () => read().map((r) => r.text),
      add: (text) => {
        const all = read();
        let at = all.findIndex((r) => r.text === text);
        if (at < 0) at = all.length < 9 ? all.length : all.reduce((old, r, i) => (r.used < all[old].used ? i : old), 0);
        all[at] = { text, used: Date.now() };
        try { localStorage.setItem(name, JSON.stringify(all)); } catch { /* storage is blocked */ }
      },
    };
  };
  window.tidings = { reasons };

  // Send a form once only.
  document.addEventListener("submit", (e) => {
    if (e.target.method !== "post") return;
    if (e.target.dataset.sent) e.preventDefault();
    e.target.dataset.sent = "yes";
  });
  window.addEventListener("pageshow", () => { for (const f of document.forms) delete f.dataset.sent; });

  // Keys.
  const help = document.getElementById("help");
  const keys = document.getElementById("keys");
  if (help && keys) keys.addEventListener("click", () => help.showModal());
  let g = 0;
  const find = document.getElementById("find");
  document.addEventListener("keydown", (e) => {
    if (find && (e.ctrlKey || e.metaKey) && e.key.toLowerCase() === "k" && !e.shiftKey && !e.altKey) {
      e.preventDefault();
      find.focus();
      find.select();
      return;
    }
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, textarea, select, [contenteditable]")) return;
    if (document.querySelector("dialog[open]")) return;
    if (Date.now() - g < 1500) {
      g = 0;
      const link = document.querySelector(`nav a[data-key="${CSS.escape(e.key)}"]`);
      if (link) { e.preventDefault(); link.click(); }
      return;
    }
    if (e.key === "g") {
      g = Date.now();
    } else if (e.key === "/") {
      const search = document.querySelector("[data-search]") || find;
      if (search) { e.preventDefault(); search.focus(); search.select(); }
    } else if (e.key === "r") {
      location.reload();
    } else if (e.key === "?" && help) {
      e.preventDefault();
      help.showModal();
    }
  });
})();
