// Applies the theme that the reader chose, before the first paint.
(() => {
  try {
    const theme = localStorage.getItem("tidings-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch { /* storage is blocked: use the system's theme */ }
})();
