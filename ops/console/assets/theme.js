// Applies the theme that the reader chose, and shows what needs scripts, before the first paint. So nothing moves later.
(() => {
  document.documentElement.classList.add("scripts");
  try {
    const theme = localStorage.getItem("tidings-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch { /* storage is blocked: use the system's theme */ }
})();
