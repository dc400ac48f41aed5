// The theme gives the copy buttons of every block of code the same landmark: number them, so that each can be found.
const number = () => document.querySelectorAll(".md-code__nav").forEach((nav, at) => nav.setAttribute("aria-label", `Code ${at + 1}`));
new MutationObserver(number).observe(document.documentElement, { childList: true, subtree: true });
