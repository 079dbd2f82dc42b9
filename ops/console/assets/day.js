// The last day: times in the reader's zone, and the values under the pointer. Without this file the charts have their
// times in UTC, and their values as the tooltips of the browser.
(() => {
  "use strict";
  const tip = document.getElementById("hover");
  const box = document.getElementById("live");
  const short = new Intl.DateTimeFormat("sv-SE", { timeStyle: "short" });
  const exact = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
  const localize = () => {
    for (const t of box.querySelectorAll("text[data-time]")) {
      const says = short.format(new Date(t.dataset.time));
      if (t.textContent !== says) t.textContent = says;
    }
  };
  localize();
  new MutationObserver(localize).observe(box, { childList: true, subtree: true, characterData: true });

  const show = (e) => {
    const step = e.target.closest && e.target.closest("rect[data-time]");
    for (const on of box.querySelectorAll("rect.here")) if (on !== step) on.classList.remove("here");
    tip.hidden = !step;
    if (!step) return;
    step.classList.add("here");
    const title = step.querySelector("title"); // in its place, so that the browser does not show both
    if (title) {
      step.dataset.says = title.textContent;
      title.remove();
    }
    const [, ...values] = step.dataset.says.split("\n");
    tip.textContent = [exact.format(new Date(step.dataset.time)), ...values].join("\n");
    const at = step.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(at.left + 12, document.documentElement.clientWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(8, at.top - tip.offsetHeight - 6) + "px";
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("pointerdown", show);
})();
