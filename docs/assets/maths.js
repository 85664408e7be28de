// Render what pymdownx.arithmatex marks, with the KaTeX that is bundled beside this file.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".arithmatex").forEach((element) => {
    const display = element.tagName === "DIV";
    const source = element.textContent.trim().replace(/^\\[[(]|\\[\])]$/g, "");
    katex.render(source, element, { displayMode: display, throwOnError: false });
  });
});
