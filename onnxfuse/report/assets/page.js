// The theme, the link to the section in view, and the start of the other scripts.
const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  themeButton.querySelector("span").textContent = theme;
  try { localStorage.setItem("onnxfuse-theme", theme); } catch { /* a browser may refuse storage to local files */ }
}

let theme = "auto";
try { theme = localStorage.getItem("onnxfuse-theme") || theme; } catch { /* as above */ }
setTheme(THEMES.includes(theme) ? theme : "auto");
themeButton.addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));

const links = [...document.querySelectorAll("nav a")];
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((each) => each.isIntersecting)) {
    links.forEach((link) => link.hash === `#${entry.target.id}` ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current"));
  }
}, { rootMargin: "-30% 0px -65% 0px" });
links.forEach((link) => watch.observe(document.querySelector(link.hash)));

startMatches();
setTimeout(() => {  // show the page first: laying out the picture takes time
  startPanes();
  document.documentElement.dataset.ready = "yes";
});
