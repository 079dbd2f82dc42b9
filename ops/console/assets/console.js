// Without this file readers can still read and act. It adds the reader's time zone, live pages, keys, copying and the theme.
(() => {
  "use strict";
  const root = document.documentElement;

  // Times: the server writes UTC. Show them in the reader's zone, as wide as before (2030-01-31 23:59:59), so that
  // nothing moves. The title keeps the exact time.
  const format = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
  const localize = (within) => {
    for (const t of within.querySelectorAll("time[datetime]")) {
      const text = format.format(new Date(t.dateTime));
      if (t.textContent !== text) t.textContent = text;
    }
  };
  localize(document);
  // The observer runs before the next paint.
  new MutationObserver(() => localize(document)).observe(document.body, { childList: true, subtree: true, characterData: true });

  // On a phone the navigation is a strip: scroll to the entry of this page.
  const nav = document.querySelector(".body > nav");
  const here = nav && nav.querySelector("[aria-current]");
  if (here) nav.scrollLeft = here.offsetLeft - nav.offsetLeft - (nav.clientWidth - here.offsetWidth) / 2;

  // Live pages: htmx's SSE extension shows each message, and stops while the tab is hidden. A tab opened hidden
  // connects when it becomes visible.
  const live = document.querySelector("[data-live]");
  const connect = () => {
    if (!live || document.hidden || live.hasAttribute("hx-sse:connect")) return;
    live.setAttribute("hx-sse:connect", live.dataset.live);
    live.setAttribute("hx-swap", "innerMorph");
    window.htmx.process(live);
  };
  connect();
  document.addEventListener("visibilitychange", connect);
  document.addEventListener("htmx:sse:after:message", () => { root.dataset.live = String(Number(root.dataset.live || 0) + 1); });

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
  showHealth();
  document.addEventListener("htmx:sse:after:message", showHealth);

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
  const say = (text) => { document.getElementById("said").textContent = text; };
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
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, textarea, select, [contenteditable]") || (help && help.open)) return;
    if (Date.now() - g < 1500) {
      g = 0;
      const link = document.querySelector(`nav a[data-key="${CSS.escape(e.key)}"]`);
      if (link) { e.preventDefault(); link.click(); }
      return;
    }
    if (e.key === "g") {
      g = Date.now();
    } else if (e.key === "/") {
      const search = document.querySelector("[data-search]");
      if (search) { e.preventDefault(); search.focus(); search.select(); }
    } else if (e.key === "r") {
      location.reload();
    } else if (e.key === "?" && help) {
      e.preventDefault();
      help.showModal();
    }
  });
})();
