// Before the first paint: the theme that the reader chose.
(() => {
  try {
    const theme = localStorage.getItem("tidings-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch { /* storage is blocked: as the system is */ }
})();
