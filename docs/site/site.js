// What the theme leaves without a name or out of the keyboard's reach (WCAG 2.2, 1.3.1, 2.1.1 and 4.1.2).
const name = () => {
  // it gives the copy buttons of every block of code the same landmark: number them, so that each can be found
  document.querySelectorAll(".md-code__nav").forEach((nav, at) => nav.setAttribute("aria-label", `Code ${at + 1}`));
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  // the corner of a table whose rows have names heads no column
  for (const head of document.querySelectorAll("th:empty")) head.setAttribute("role", "cell");
  for (const wide of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
};
new MutationObserver(name).observe(document.documentElement, { childList: true, subtree: true });
addEventListener("load", name);
